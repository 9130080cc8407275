"""`dflash-ops export`: a checkpoint that was brought home, in the format that a server takes alone.

The work is the bundled trainer's, in a process of the Python that runs dflash-ops; the settings are the run's own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.config import bundled
from dflash_ops.deploy.naming import refuse_no_run
from dflash_ops.deploy.scratch import scratch_folder
from dflash_ops.errors import ExitCode, OpsError
from dflash_ops.files import write_json

REFUSED = 2
"""The trainer's exit code for input that it refuses; its last line says what, where and what would do."""


@dataclass(frozen=True)
class Source:
    """One complete checkpoint of a run that is here, and the settings that it was trained with."""

    run: str
    checkpoint: Path
    settings: dict[str, Any]


def find_source(runs: Path, run: str | None, step: int | None) -> Source:
    """The checkpoint of `step` (None: the newest) of `run` (None: the latest that has one).

    Raises OpsError (exit 2).
    """
    if run is not None:
        refuse_no_run(run, (path.name for path in runs.glob("*")), str(runs))
    # names sort by time
    names = [run] if run is not None else sorted((path.name for path in runs.glob("*")), reverse=True)
    for name in names:
        steps = _steps(runs / name)
        if steps and (step is None or step in steps):
            settings = _object(runs / name / "settings.json")
            return Source(name, steps[max(steps) if step is None else step], settings)
        if steps:
            there = ", ".join(str(each) for each in sorted(steps))
            raise _refused(f"there is no checkpoint of step {step}: {there} are here", str(runs / name))
    where = str(runs / run) if run is not None else str(runs)
    raise _refused("there is no complete checkpoint here", where, "bring it home: dflash-ops collect")


def export(source: Source, out: Path, *, target: Path | None, verifier: str | None) -> None:
    """Writes the folder `out`, whole or not at all. Raises OpsError: exit 2 where the trainer refuses, else 5.

    `target`: where the target lies on this machine; None: where the run's settings say. `verifier`: by what name a
    server finds it.
    """
    if importlib.util.find_spec("torch") is None:
        raise OpsError(
            f"{sys.executable} has no torch",
            exit_code=ExitCode.BLOCKED,
            kind="export",
            where="this workstation",
            fix="install the trainer's packages: pip install 'dflash-ops[trainer]'",
        )
    workload = dict(source.settings["workload"])
    if target is not None:
        workload["target"] = str(target)
    # the host's own cache and prepared data are not here
    settings = {**source.settings, "workload": workload, "prepared": None, "cache": str(_cache())}
    with scratch_folder() as folder:
        file = folder / "settings.json"
        write_json(file, settings)
        command = [sys.executable, "-m", "trainer", "export", "--format", "speculators"]
        command += ["--settings", str(file), "--checkpoint", str(source.checkpoint)]
        command += ["--out", str(out), *(["--verifier", verifier] if verifier is not None else [])]
        environment = {
            **os.environ,
            "PYTHONPATH": str(bundled("trainer").parent),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        ended = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", env=environment)
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        refused = ended.returncode == REFUSED
        raise OpsError(
            said[-1].removeprefix("refused: "),
            exit_code=ExitCode.USAGE if refused else ExitCode.BLOCKED,
            kind="export",
            where=str(source.checkpoint),
            fix="--target says where the target lies here" if "workload.target" in said[-1] else "",
            evidence=None if refused else said[-20:],
        )


def _steps(folder: Path) -> dict[int, Path]:
    """A run's complete checkpoints here, by step: those with a manifest."""
    found = [path.parent for path in folder.glob("checkpoints/step-*/manifest.json")]
    return {int(path.name[5:]): path for path in found if path.name[5:].isdecimal()}


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as wrong:
        raise _refused(f"cannot be read: {wrong}", str(path), "bring it home again: dflash-ops collect") from None
    if not isinstance(value, dict) or not isinstance(value.get("workload"), dict):
        raise _refused("these are no settings of a run", str(path), "bring it home again: dflash-ops collect")
    return value


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "dflash-ops" / "trainer"


def _refused(what: str, where: str, fix: str = "") -> OpsError:
    return OpsError(
        what,
        exit_code=ExitCode.USAGE,
        kind="export",
        where=where,
        fix=fix or "dflash-ops collect brings runs and checkpoints home",
    )
