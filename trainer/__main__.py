"""`python -m trainer VERB --settings FILE --out DIR`: the verbs of docs/trainer-contract.md."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import logging
import os
import sys
import threading
from pathlib import Path

from trainer.collector import keep_from_collector, paused_collector
from trainer.errors import EndpointFailed, InputError, WorkerFailed
from trainer.stacks import STACKS, print_stacks_on_signal
from trainer.stopping import Term

_OK, _FAILED, _REFUSED, _STOPPED = 0, 1, 2, 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Train a DFlash drafter.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, what in (
        ("check", "validate settings against this machine"),
        ("prepare", "make the data that check says is needed"),
        ("tune", "prove and time every strategy on this machine"),
        ("canary", "prove the workload on this machine"),
        ("run", "train"),
        ("evaluate", "judge a checkpoint by speculative decoding"),
        ("export", "write a checkpoint in another format"),
    ):
        verb = verbs.add_parser(name, help=what, description=what)
        verb.add_argument("--settings", type=Path, required=True, metavar="FILE")
        verb.add_argument("--out", type=Path, required=True, metavar="DIR")
        if name in ("evaluate", "export"):
            verb.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
        if name == "export":
            verb.add_argument("--format", choices=["speculators"], required=True)
            verb.add_argument("--verifier", metavar="NAME", help="the target's name or folder where it will be served")
    return parser


def main() -> int:
    """Run one verb; the exit code of the contract."""
    arguments = _parser().parse_args()
    faulthandler.enable()
    print_stacks_on_signal()
    term = Term()
    if arguments.verb == "run":
        # before anything slow is imported: a run that is stopped early still ends well
        term.listen()
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(threadName)s %(message)s", datefmt="%H:%M:%S"
    )
    try:
        return _verb(arguments, term)
    except InputError as refused:
        with contextlib.suppress(OSError):
            # a full disk: the line below says the same
            _write_refusal(arguments.verb, arguments.out, refused)
        print(f"refused: {refused}", file=sys.stderr, flush=True)
        return _REFUSED
    except EndpointFailed as failed:
        print(failed, file=sys.stderr, flush=True)
        return _FAILED
    except WorkerFailed as failed:
        # the worker's own traceback is in the log already
        print(failed, file=sys.stderr, flush=True)
        return _FAILED


_MODULES = {
    "check": "trainer.check",
    "prepare": "trainer.prepare",
    "canary": "trainer.canary",
    "tune": "trainer.tune.tuner",
    "run": "trainer.train_dflash_pipeline",
    "evaluate": "trainer.judge",
    "export": "trainer.export",
}


def _environment(cache: Path) -> None:
    """What libraries read when they are first imported."""
    # several workers' OpenMP pools share the CPUs: waiting threads must sleep, not spin (ten times slower otherwise)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # bars of loaders and converters would fill the log
    os.environ.setdefault("TQDM_DISABLE", "1")
    # compiled kernels are kept, so that a run reuses what its canary compiled
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))


def _write_refusal(verb: str, out: Path, problem: InputError) -> None:
    """What machines read is in files: `check.json` of settings that cannot even be read, else `refused.json`."""
    from trainer.files import write_json
    from trainer.settings import CONTRACT

    told = {"what": problem.what, "where": problem.where, "fix": problem.fix}
    if verb == "check":
        nothing: dict[str, object] = {"warnings": [], "prepare": None, "tune": None, "devices": []}
        write_json(out / "check.json", {"contract": CONTRACT, "outcome": "refused", "problems": [told], **nothing})
    elif verb != "export":
        write_json(out / "refused.json", {"contract": CONTRACT, **told})


def _verb(arguments: argparse.Namespace, term: Term) -> int:
    from trainer.settings import read_settings

    out = arguments.out
    if arguments.verb != "export":
        # which makes its folder itself, whole
        out.mkdir(parents=True, exist_ok=True)
    settings = read_settings(arguments.settings)
    _environment(settings.cache.absolute())
    # what is imported lives as long as the process: looking for rubbish in it takes a fifth of the time
    with paused_collector():
        if arguments.verb in ("canary", "tune", "run") and settings.workload.strategy != "eager":
            # its compile processes take seconds to start: meanwhile the rest is imported
            importlib.import_module("torch._inductor.async_compile")
        importlib.import_module(_MODULES[arguments.verb])
    keep_from_collector()
    if arguments.verb == "check":
        from trainer.check import check

        problems = check(settings, out)
        for problem in problems:
            print(f"refused: {problem}", file=sys.stderr, flush=True)
        return _REFUSED if problems else _OK
    if arguments.verb == "prepare":
        from trainer.prepare import prepare

        prepare(settings, out)
        return _OK
    if arguments.verb == "canary":
        from trainer.canary import run_canary

        return run_canary(settings, out)
    if arguments.verb == "tune":
        from trainer.tune.tuner import tune

        return tune(settings, arguments.settings, out)
    if arguments.verb == "evaluate":
        from trainer.judge import judge_checkpoint

        judge_checkpoint(settings, arguments.checkpoint, out)
        return _OK
    if arguments.verb == "export":
        from trainer.export import export

        export(settings, arguments.checkpoint, arguments.verifier, out)
        return _OK
    from trainer.train_dflash_pipeline import run
    from trainer.tune.table import named

    result = run(named(settings), out, stop=term.is_set)
    return _STOPPED if result.outcome == "stopped" else _OK


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if any(each.name != STACKS for each in threading.enumerate() if each is not threading.main_thread()):
        # a worker that hangs is a daemon thread inside torch: tearing the interpreter down under it can crash
        os._exit(code)
    sys.exit(code)
