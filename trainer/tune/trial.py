"""One strategy in a process of its own: `python -m trainer.tune.trial PHASE --settings FILE --strategy NAME --out DIR`.

`proof`: the canary's gate, its numbers and structure, into `evidence.json`. `timing`: steady steps, into `timing.json`.
Each phase has its own process, so that neither the proof's memory nor its compiled code is in what is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path

from trainer.canary.out_of_memory import explained
from trainer.errors import InputError, WorkerFailed
from trainer.files import write_json
from trainer.settings import Settings, read_settings
from trainer.stacks import print_stacks_on_signal

PROOF, TIMING = "proof", "timing"
EVIDENCE, TIMES, WHY = "evidence.json", "timing.json", "failed.json"
FAILED, REFUSED = 1, 2
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """A tuner that is killed leaves no trial behind on its GPUs."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prove(settings: Settings, out: Path) -> int:
    from trainer.canary.entry import prove
    from trainer.canary.evidence import Evidence
    from trainer.canary.watchdog import Watchdog, told_to
    from trainer.collector import paused_collector

    evidence = Evidence(out)
    with paused_collector(), Watchdog("tune", settings.workload.canary_timeout_s, told_to(evidence)):
        prove(settings, evidence)
    return evidence.write(f"strategy {settings.workload.strategy} computes the right numbers")


def _time(settings: Settings, out: Path) -> int:
    from trainer.canary.gate import gate_settings
    from trainer.canary.timing import time_steps
    from trainer.canary.watchdog import Watchdog
    from trainer.collector import paused_collector
    from trainer.parts import load_parts

    def bitten(summary: str) -> int:
        return _failed(out, summary)

    with paused_collector(), Watchdog("tune", settings.workload.canary_timeout_s, bitten):
        timing = time_steps(load_parts(gate_settings(settings)))
    write_json(out / TIMES, asdict(timing))
    return 0


def _failed(out: Path, why: str) -> int:
    write_json(out / WHY, {"why": why})
    return FAILED


def main() -> int:
    """Run one phase; its exit code is the canary's, 0, or 1 with the reason in `failed.json`."""
    parser = argparse.ArgumentParser(prog="python -m trainer.tune.trial")
    parser.add_argument("phase", choices=[PROOF, TIMING])
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    _end_with_parent()
    faulthandler.enable()
    print_stacks_on_signal()
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(threadName)s %(message)s", datefmt="%H:%M:%S"
    )
    settings = read_settings(arguments.settings)
    settings = replace(settings, workload=replace(settings.workload, strategy=arguments.strategy))
    try:
        return (_prove if arguments.phase == PROOF else _time)(settings, arguments.out)
    except InputError as refused:
        print(f"refused: {refused}", file=sys.stderr, flush=True)
        return REFUSED
    except WorkerFailed as failed:
        # its traceback is in the log already
        return _failed(arguments.out, explained(failed, settings) or str(failed))
    except Exception as error:
        traceback.print_exc()
        return _failed(arguments.out, explained(error, settings) or f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # whatever threads are left, nothing is torn down under them
    os._exit(code)
