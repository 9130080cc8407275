"""`python -m tiny_trainer VERB --settings FILE --out DIR`: verbs, signals and exit codes of the contract."""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from . import checkpoint, files
from .canary import canary
from .check import check
from .data import prepare_rows, rows_file
from .errors import InputError
from .evaluate import evaluate
from .pipeline import WorkerFailed, run
from .settings import Settings, load
from .stacks import print_on_signal
from .stopping import stopped_by_term
from .target import load_target
from .tune import tune
from .tuning import resolved

REFUSED, STOPPED, FAILED = 2, 20, 1


def _prepare(settings: Settings, out: Path) -> int:
    rows = prepare_rows(settings)
    lines = [json.dumps({"input_ids": row.input_ids, "loss_mask": row.loss_mask}) + "\n" for row in rows]
    files.write_bytes(rows_file(out), "".join(lines).encode())
    tokens = sum(sum(row.loss_mask) for row in rows)
    files.write_json(out / "prepare.json", {"contract": 1, "rows": len(rows), "answer_tokens": tokens})
    return 0


def _run(settings: Settings, out: Path) -> int:
    stop = threading.Event()
    with stopped_by_term(stop):
        result = run(settings, out, stop)
    return 0 if result.outcome == "completed" else STOPPED


def _evaluate(settings: Settings, out: Path, folder: Path) -> int:
    target = load_target(settings.workload.target)
    manifest = checkpoint.verify(folder, "--checkpoint")
    shape, parameters = checkpoint.load(folder, target, "--checkpoint")
    result = evaluate(settings, target, shape, parameters)
    if result is None:
        raise InputError("no prompts are held out", "training.evaluation_prompts", "give prompts to evaluate")
    files.write_json(out / "evaluation.json", {"contract": 1, "step": manifest["step"], **asdict(result)})
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tiny_trainer")
    parser.add_argument("verb", choices=["check", "prepare", "tune", "canary", "run", "evaluate"])
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="for `evaluate`")
    arguments = parser.parse_args()
    if (arguments.checkpoint is not None) != (arguments.verb == "evaluate"):
        parser.error("--checkpoint belongs to `evaluate`, and `evaluate` needs it")
    return arguments


def _dispatch(verb: str, settings_file: Path, out: Path, folder: Path | None) -> int:
    if verb == "check":
        problems = check(settings_file, out)
        for problem in problems:
            print(problem, file=sys.stderr)
        return REFUSED if problems else 0
    settings = load(settings_file)
    if verb == "prepare":
        return _prepare(settings, out)
    if verb == "tune":
        return tune(settings, out)
    if verb == "canary":
        return canary(resolved(settings), out)
    if verb == "run":
        return _run(resolved(settings), out)
    assert folder is not None
    return _evaluate(settings, out, folder)


def main() -> int:
    """Run one verb; returns the exit code."""
    faulthandler.enable()
    print_on_signal()
    arguments = _arguments()
    try:
        return _dispatch(arguments.verb, arguments.settings, arguments.out, arguments.checkpoint)
    except InputError as error:
        told = {"what": error.what, "where": error.where, "fix": error.fix}
        files.write_json(arguments.out / "refused.json", {"contract": 1, **told})
        print(error, file=sys.stderr)
        return REFUSED
    except WorkerFailed as error:  # its traceback is in the log under its name
        print(f"the run failed: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
