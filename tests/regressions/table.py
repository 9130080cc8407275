"""`python -m tests.regressions.table`: writes README.md from faults.py, which the tests use; a test compares both."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from tests.regressions.fault import Check, Fault, Rule
from tests.regressions.faults import FAULTS
from tests.regressions.refresh import ROOT

README = Path(__file__).with_name("README.md")
_GPUS = {0: "", 1: "a GPU", 2: "two GPUs"}
_HEAD = """\
# Faults of the trainer, and what stops each

Each patch in `patches/` breaks `trainer/` in one way. It goes through the real build, as a playbook's `patches:` do,
then through the static check and, where the machine can show it, through the real canary. A fault that nothing stops
fails the tests.

    python -m pytest tests/regressions       # on a CPU
    python benchmarks/regressions.py OUT     # on a GPU box: all that concerns CUDA, and clean canaries for false alarms

* *rule*: a rule of `dflash-ops check` stops the build; *warning*: it is shown and the build goes on. A warning alone
  stops nothing: each fault has a rule that refuses the build, or a check that fails.
* *check*: the canary's check of that name fails. Where a rule stops the build before, it is what would stop it then.
* **alone**: no other rule, or no other check that the canary came to, says anything: deleting it fails a test.
* *where*: a machine on which that was said. The static check says it anywhere.
* *CUDA*: the fault concerns CUDA, and its canary runs on so many GPUs. Where no row of *where* is a GPU, it is asked
  only that the fault is stopped there; `benchmarks/regressions.py` records what the canary said.

`python -m tests.regressions.refresh` moves the hunks after an edit of the trainer, and
`python -m tests.regressions.table` writes this page from `faults.py`.

"""


def render(faults: Iterable[Fault] = FAULTS) -> str:
    """The page."""
    columns = ["patch", "what it does", "what it would cost", "CUDA", "where", "stopped by", "message"]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for fault in faults:
        places = {"the build": fault.rule, "a CPU": fault.cpu, _GPUS[fault.gpus]: fault.cuda}
        stops = {where: stop for where, stop in places.items() if stop is not None}
        by = "<br>".join(_by(stop) for stop in stops.values())
        says = "<br>".join(f"`{stop.says}`" if stop.says else "an error of torch" for stop in stops.values())
        cells = [f"`{fault.name}`", fault.what, fault.lost, _GPUS[fault.gpus], "<br>".join(stops), by, says]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([_HEAD, *rows, ""])


def documented_checks() -> set[str]:
    """The canary's checks, from the table in docs/trainer.md."""
    lines = (ROOT / "docs" / "trainer.md").read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("| check |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def _by(stop: Rule | Check) -> str:
    kind = "check" if isinstance(stop, Check) else "warning" if stop.warns else "rule"
    return f"{kind} `{stop.id}`" + (", **alone**" if stop.alone else "")


if __name__ == "__main__":
    README.write_text(render())
