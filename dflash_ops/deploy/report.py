"""`report.md`: what a run was, what proved it, what came out. Written from the collected files only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_ops.deploy.endings import doubtful, reason_of, refuses, why
from dflash_ops.deploy.lines import gist
from dflash_ops.deploy.pipeline import bottleneck
from dflash_ops.deploy.times import utc
from dflash_ops.deploy.tuning import COLUMNS, rows
from dflash_ops.files import write_bytes

STEPS_SHOWN = 12
LONGEST_VALUE = 300
DOUBT = "after the last finite loss: its weights may be no numbers"
KEY_PACKAGES = ("torch", "triton", "transformers")
STEP_COLUMNS = (("loss", ".4f"), ("first_slot_accuracy", ".3f"), ("learning_rate", ".2e"), ("grad_norm", ".3f"))


def write_report(folder: Path) -> Path:
    """`folder` is `runs/<run>/`, of a run or of a canary. Returns the report's path."""
    path = folder / "report.md"
    # hosts may say what is no text
    write_bytes(path, ("\n".join(_lines(folder)) + "\n").encode(errors="replace"))
    return path


def _lines(folder: Path) -> Iterator[str]:
    record, status = _read(folder / "record.json"), _read(folder / "status.json")
    settings, result = _read(folder / "settings.json"), _read(folder / "result.json")
    yield f"# {'Canary' if record.get('command') == 'canary' else 'Run'} {record.get('run', folder.name)}"
    yield ""
    yield from _part("run.json", lambda: _facts(record, _read(folder / "run.json"), status, settings))
    yield from _part("exit.json", lambda: _record_that_ended_it(status.get("exit")))
    yield from _part("settings.json", lambda: _settings(settings))
    yield from _part("verdict.json", lambda: _canary(_read(folder / "verdict.json")))
    yield from _part("prepare.json", lambda: _data(_read(folder / "prepare.json")))
    yield from _part("result.json", lambda: _quality(result))
    yield from _part("metrics.ndjson", lambda: _steps(folder / "metrics.ndjson"))
    yield from _files(folder, result, status.get("exit"))


def _part(name: str, lines: Callable[[], Iterator[str]]) -> Iterator[str]:
    """What a host or a trainer wrote may be anything, and is no reason to tell nothing of the rest."""
    try:
        yield from list(lines())
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        yield f"(`{name}` is not what it should be, so that this part is missing.)"
        yield ""


def _facts(
    record: dict[str, Any], run: dict[str, Any], status: dict[str, Any], settings: dict[str, Any]
) -> Iterator[str]:
    skipped = run.get("skipped_canary") or record.get("skipped_canary")
    if skipped:
        yield f"**The canary was skipped:** {skipped}"
        yield ""
    for name, value in (
        ("state", status.get("state")),
        ("host", record.get("host")),
        ("playbook", record.get("playbook")),
        ("prepares", run.get("prepares")),
        ("release", record.get("release")),
        ("devices", ", ".join(status.get("devices") or [])),
        ("started", utc(status.get("started"))),
        ("ended", utc(status.get("ended"))),
        ("exit", _ending(status.get("exit"))),
        ("refused" if refuses(status.get("exit")) else "reason", why(status.get("exit"))),
        ("lost", status.get("hint")),
        ("disk", _table(status.get("disk_low")).get("what")),
        ("nobody was told", _table(status.get("untold")).get("what")),
        ("goes on with", _origin(run, settings)),
        ("began with the weights of", _table(settings.get("training")).get("init_from")),
        ("went on as", (status.get("next") or {}).get("run")),
    ):
        if value:
            yield f"- {name}: {value}"
    if run.get("python_version"):
        yield f"- python: {run['python_version']} at {run.get('python')}{_versions(_table(run.get('packages')))}"
    if run.get("managed"):
        yield f"- environment: managed, {run['managed']}"
    for name, asset in sorted(_table(run.get("assets")).items()):
        yield f"- asset {name}: {_table(asset).get('path')}, sha256 {_table(asset).get('sha256')}"
    yield ""


def _ending(ended: dict[str, Any] | None) -> str:
    if not ended:
        return ""
    words = f"signal {ended['signal']}" if ended.get("signal") else f"code {ended['code']}"
    return (
        words
        + (", after SIGKILL" if ended.get("forced") else "")
        + (f": {ended['error']}" if ended.get("error") else "")
    )


def _origin(run: dict[str, Any], settings: dict[str, Any]) -> str:
    """The run that this one goes on with, and where it began."""
    began = run.get("prepares") or _table(settings.get("training")).get("resume_from")
    if not run.get("parent"):
        return ""
    return f"{run['parent']}, from {began}" if began else f"{run['parent']}, from the beginning"


def _record_that_ended_it(ended: dict[str, Any] | None) -> Iterator[str]:
    reason = reason_of(ended)
    record, at_work = reason.get("record"), reason.get("at_work")
    if record:
        yield "The record whose loss or gradient norm is not finite; it names the samples of each worker:"
    elif at_work:
        yield "The step and the samples that each worker had begun when the run hung:"
    else:
        return
    yield ""
    yield "```json"
    yield json.dumps(record or at_work)
    yield "```"
    yield ""


def _settings(settings: dict[str, Any]) -> Iterator[str]:
    for section in ("workload", "training"):
        values = settings.get(section)
        if isinstance(values, dict):
            yield f"{section}: " + ", ".join(f"`{key}={json.dumps(value)}`" for key, value in sorted(values.items()))
            yield ""


def _canary(verdict: dict[str, Any]) -> Iterator[str]:
    if not verdict:
        return
    evidence = verdict.get("evidence") or {}
    yield "## Canary"
    yield ""
    yield f"{verdict['outcome']}: {gist(str(evidence.get('summary', '')))}"
    yield ""
    yield "| check | worker | outcome | |"
    yield "|---|---|---|---|"
    for check in evidence.get("checks", []):
        worker = "" if check.get("worker") is None else check["worker"]
        outcome, summary = check["outcome"].replace("_", " "), gist(str(check.get("summary", "")))
        yield f"| {check['id']} | {worker} | {outcome} | {_cell(summary)} |"
    yield ""
    yield from _tuning(_table(evidence.get("tuning")))
    yield "Bound to:"
    yield ""
    for name, value in sorted(verdict.get("binding", {}).items()):
        # nothing to say: no variables, or a target that the packages' versions name already
        if not value:
            continue
        yield f"- {name}: {_bound(value)}"
    yield ""


def _tuning(table: dict[str, Any]) -> Iterator[str]:
    if not table:
        return
    yield "Strategies, as `tune` measured them:"
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---|' * len(COLUMNS)}"
    for row in rows(table):
        yield f"| {' | '.join(map(_cell, row))} |"
    yield ""


def _bound(value: object) -> str:
    """Devices are a list; of the variables a secret has no value here."""
    if isinstance(value, dict):
        value = [f"{key} (secret)" if item is None else f"{key}={item}" for key, item in sorted(value.items())]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _data(prepared: dict[str, Any]) -> Iterator[str]:
    """What the trainer says of the data it made, in its own words; empty values left out."""
    words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in prepared.items()}
    known = ("contract", "key")
    told = {key: text for key, text in words.items() if key not in known and prepared[key] not in ([], {}, None)}
    if not told:
        return
    yield "## Data"
    yield ""
    for key, text in told.items():
        yield f"- {key}: {text if len(text) <= LONGEST_VALUE else 'see prepare.json'}"
    yield ""


def _quality(result: dict[str, Any]) -> Iterator[str]:
    before, after = result.get("before"), result.get("after")
    if not isinstance(before, dict):
        return
    after = after if isinstance(after, dict) else {}
    yield "## The drafter"
    yield ""
    yield "| | before | after |"
    yield "|---|---|---|"
    for key, name in (
        ("loss", "held-out loss (nats)"),
        ("first_slot_acceptance", "first-slot acceptance"),
        ("tau", "tau (accepted + bonus, mean over cycles)"),
    ):
        yield f"| {name} | {_figure(before.get(key))} | {_figure(after.get(key))} |"
    yield ""
    yield f"{result.get('steps')} optimiser steps. tau counts tokens a verification; it is no speed-up."
    yield ""


def _steps(metrics: Path) -> Iterator[str]:
    if not metrics.exists():
        return
    steps = [record for record in _records(metrics) if record.get("kind") == "step"]
    if not steps:
        return
    yield "## Training"
    yield ""
    yield "| step | loss (nats) | first-slot accuracy | learning rate | gradient norm |"
    yield "|---|---|---|---|---|"
    stride = max(1, -(-len(steps) // STEPS_SHOWN))
    shown = steps[::stride]
    if shown[-1] is not steps[-1]:
        shown.append(steps[-1])
    for step in shown:
        figures = (_figure(step.get(key), form) for key, form in STEP_COLUMNS)
        yield f"| {step.get('step')} | {' | '.join(figures)} |"
    yield ""
    if told := bottleneck(steps):
        yield f"Over all steps: {told}."
        yield ""


def _records(metrics: Path) -> Iterator[dict[str, Any]]:
    for line in metrics.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            # a full disk or a kill cuts a line in the middle
            continue
        if isinstance(record, dict):
            yield record


def _files(folder: Path, result: dict[str, Any], ended: dict[str, Any] | None) -> Iterator[str]:
    checkpoints = sorted(path for path in (folder / "checkpoints").glob("step-*") if (path / "manifest.json").exists())
    figures = [folder / "metrics.ndjson", folder / "prepare.json", folder / "tensorboard"]
    paths = [*sorted((folder / "log").glob("*.log")), *figures, *checkpoints]
    there = [path for path in paths if path.exists()]
    if not there:
        return
    yield "## Files"
    yield ""
    after = doubtful(checkpoints, ended)
    for path in there:
        last = " (the last)" if str(result.get("checkpoint", "")).endswith(path.name) else ""
        doubt = f" ({DOUBT})" if path in after else ""
        yield f"- `{path.relative_to(folder)}`{last}{doubt}"


def _figure(value: object, form: str = ".3f") -> str:
    """Empty where there is none: a held-out loss is null when no answer fits a bucket."""
    return format(value, form) if isinstance(value, int | float) else ""


def _versions(packages: dict[str, Any]) -> str:
    """Those that decide how a run computes; run.json has all."""
    named = [f"{name} {packages[name]}" for name in KEY_PACKAGES if name in packages]
    return f", {', '.join([*named, f'{len(packages)} packages'])}"


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _read(path: Path) -> dict[str, Any]:
    """Empty for what is missing or damaged: a report tells what there is."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
