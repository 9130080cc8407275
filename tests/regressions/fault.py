"""What a fault is: one patch that breaks the trainer in one way, and what stops it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PATCHES = Path(__file__).parent / "patches"


@dataclass(frozen=True)
class Rule:
    """A rule of the static check: the build stops, or (`warns`) goes on and the finding is shown.

    `says` is part of the finding's reason. `alone`: no other rule finds anything in the whole release.
    """

    id: str
    says: str
    warns: bool = False
    alone: bool = True


@dataclass(frozen=True)
class Check:
    """A check of the canary that fails, or (`inconclusive`) finds that nothing would be proved.

    `says` is part of its summary. `alone`: every other check that the canary came to passes. `races`: checks that may
    say it instead, where it hangs on timing which is first. `dies`: or a signal ends the process before it wrote any
    evidence, which stops a deploy as well.
    """

    id: str
    says: str
    alone: bool = True
    inconclusive: bool = False
    races: tuple[str, ...] = ()
    dies: bool = False

    @property
    def outcome(self) -> str:
        """What the evidence calls it."""
        return "inconclusive" if self.inconclusive else "fail"


@dataclass(frozen=True)
class NoFault:
    """`why` no patch makes a check fail, and the `test` in tests/trainer that shows it failing: FILE::FUNCTION."""

    why: str
    test: str


@dataclass(frozen=True)
class Fault:
    """`patches/NAME.patch`. `what` it does and what a user would have `lost`: a line each.

    `cpu` and `cuda` are what the canary says there. A rule may stop the build before: then it is what would stop it,
    were the rule not there. `cpu` is None where no CPU can show the fault. `gpus` is 0 where the fault does not concern
    CUDA, else how many GPUs its canary runs on; `cuda` is None there until somebody has seen what the canary says: only
    that the fault is stopped is then asked, and benchmarks/regressions.py records the words.
    `workload` overrides the smallest workload; a fault of compiled code names its strategy there.
    """

    name: str
    what: str
    lost: str
    rule: Rule | None = None
    cpu: Check | None = None
    cuda: Check | None = None
    gpus: int = 0
    workload: Mapping[str, object] = field(default_factory=dict)

    @property
    def patch(self) -> Path:
        """The patch's file."""
        return PATCHES / f"{self.name}.patch"

    @property
    def refused(self) -> bool:
        """Whether a rule or a check ends the deploy: a warning goes on."""
        return (self.rule is not None and not self.rule.warns) or self.cpu is not None or self.cuda is not None

    @property
    def compiles(self) -> bool:
        """Whether the canary compiles anything on a CPU."""
        return self.cpu is not None and self.workload.get("strategy", "eager") != "eager"
