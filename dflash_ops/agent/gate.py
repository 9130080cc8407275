"""The gate: no run without a passing verdict for exactly this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional

from .arguments import Arguments
from .conversation import Conversation
from .errors import AgentError, ExitCode
from .jobs import Job
from .pythons import Environment, probed_lately
from .verdicts import Binding, Outcome, Verdict, VerdictStore, stamp, stamp_with_environment
from .workdir import WorkDir

NO_LIMIT = float(10 * 365 * 86400)


@dataclass(frozen=True)
class Decision:
    """`why` is a sentence for people, whether the verdict holds or not."""

    verdict: Optional[Verdict]
    holds: bool
    why: str


def decide(store: VerdictStore, binding: Binding, max_age_s: float) -> Decision:
    verdict = store.last(binding)
    if verdict is None:
        return Decision(None, False, _why_none(store, binding))
    if verdict.outcome is not Outcome.PASS:
        word = "failed" if verdict.outcome is Outcome.FAIL else "was inconclusive"
        return Decision(verdict, False, f"the canary {word} {_ago(verdict)}: {verdict.summary}")
    if verdict.is_old(max_age_s):
        limit = _span(min(verdict.max_age_s, max_age_s))
        return Decision(verdict, False, f"the canary passed {_ago(verdict)}, which is over the limit of {limit}")
    same = "same release, python, packages, workload, variables, devices, driver and boot"
    return Decision(verdict, True, f"the canary passed {_ago(verdict)}: {same}")


def _why_none(store: VerdictStore, binding: Binding) -> str:
    if store.is_undecided(binding):
        return "the last canary of this was begun and never decided (interrupted, killed, or a reboot)"
    near = store.nearest(binding)
    if near is None:
        return "no canary has passed on this host"
    instead = " and ".join(binding.differences(near.binding))
    return f"no canary has decided about this; the nearest that passed was for {instead}"


@dataclass(frozen=True)
class Admission:
    """What a run may start with: `verdict` is None where a written reason took its place."""

    binding: Binding
    verdict: Optional[Verdict]
    installed: Environment


def allow_launch(work: WorkDir, job: Job, max_age_s: float, reason: Optional[str], *, trains: bool = True) -> Admission:
    """AgentError `gate` where there is no verdict that holds.

    With a written reason the gate lets pass without a verdict, and what does not train: a canary proves training. A
    release that was changed on the host it never lets pass.
    """
    try:
        binding, installed = stamp_with_environment(work, job)
    except AgentError as error:
        raise _shut(error.what, ExitCode(error.exit), error.fix) if error.kind == "tampered" else error from None
    if reason is not None or not trains:
        return Admission(binding, None, installed)
    decision = decide(VerdictStore.of(work), binding, max_age_s)
    if decision.holds:
        return Admission(binding, decision.verdict, installed)
    failed = decision.verdict is not None and decision.verdict.outcome is Outcome.FAIL
    code = ExitCode.CANARY_FAILED if failed else ExitCode.CANARY_INCONCLUSIVE
    evidence = None if decision.verdict is None else decision.verdict.to_json()
    fix = "correct what the canary found" if failed else "run it: dflash-ops canary"
    raise _shut(decision.why, code, fix, evidence)


def _shut(why: str, code: ExitCode, fix: str, evidence: Optional[Dict[str, Any]] = None) -> AgentError:
    return AgentError("gate", f"nothing is launched: {why}", "gate of the host", fix, code, evidence)


def _ago(verdict: Verdict) -> str:
    return f"{_span(max(0.0, verdict.age_s))} ago"


def _span(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}s"
    return f"{seconds:.0f} s"


def op_verdict(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    job = Job.from_arguments(conversation.work, args)
    # what it is asked for is told; the gate itself looks at everything again
    binding = stamp(conversation.work, job, probed_lately)
    decision = decide(VerdictStore.of(conversation.work), binding, args.seconds("max_age_s", NO_LIMIT))
    verdict = None if decision.verdict is None else decision.verdict.to_json()
    return {"verdict": verdict, "holds": decision.holds, "why": decision.why}
