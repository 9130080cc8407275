"""One fault run, from its seed to what it found."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from tests.faults.cases import Case, Fault, Scenario, draw
from tests.faults.invariants import after_all, after_fault
from tests.faults.sites import BEAT_S, TRAINING, Ground, Site
from tests.faults.strikes import struck
from tests.typist import Command, Stuck, wait_until

LONG_STEPS = {Scenario.FOLLOW: 20, Scenario.STOP: 400}
SHORT_STEPS = 4
TRIES = 4


class NotReached(Exception):
    """The fault's place never came: this run proves nothing."""


class Broken(AssertionError):
    """Invariants that did not hold, and how to see that again."""

    def __init__(self, case: Case, problems: Sequence[str], said: str) -> None:
        found = "\n".join(f"  * {problem}" for problem in problems)
        again = f"FAULT_SEED={case.seed} python -m pytest tests/faults/test_fault_runs.py"
        super().__init__(f"seed {case.seed}: {case}\n{found}\nrepeat it: {again}\n{said}")
        self.problems = tuple(problems)


def run_seed(ground: Ground, seed: str) -> Case:
    """Runs what the seed draws; a place that is never reached is drawn again. Raises Broken."""
    for number in range(TRIES):
        case = draw(seed if number == 0 else f"{seed}/{number}")
        try:
            run_case(ground, case)
        except NotReached:
            continue
        return case
    raise NotReached(f"seed {seed}: no place was reached in {TRIES} tries, the last was {case}")


def run_case(ground: Ground, case: Case) -> None:
    """Raises NotReached, or Broken with all that did not hold."""
    with ground.site(
        case.way,
        proven=case.proven,
        with_run=case.scenario is Scenario.COLLECT,
        small_disk=case.fault is Fault.FULL,
    ) as site:
        try:
            _play(site, case)
        except Stuck as stuck:
            raise Broken(case, (str(stuck),), site.said()) from None


def _play(site: Site, case: Case) -> None:
    words, run = _scene(site, case)
    with struck(case, site) as strike:
        strike.prepare()
        beat = None if case.fault in (Fault.DELAY, Fault.CLOCK) else BEAT_S
        command = site.type(*words, shaky=True, beat=beat)
        reached = strike.wait_and_strike(command)
        command.wait()
    if not reached:
        if command.code != 0:
            raise Broken(case, [f"before any fault the command ended with {command.code}"], site.said())
        raise NotReached
    runs = site.runs()
    run = run or (runs[-1] if runs else None)
    _refuse(site, case, after_fault(site, case, command, run))
    _refuse(site, case, _next_commands(site))


def _scene(site: Site, case: Case) -> tuple[list[str], str | None]:
    """What is there before the fault; the command that will meet it, and the run that it is about."""
    if case.scenario is Scenario.DEPLOY:
        return ["deploy", "--playbook", "tiny"], None
    if case.scenario is Scenario.COLLECT:
        (run,) = site.runs()
        return ["collect", run, "--optimizer"], run
    begun = _typed_well(site, "deploy", "--playbook", "tiny", "--detach", *_steps(LONG_STEPS[case.scenario]))
    run = str(begun.events[-1]["run"])
    return ["stop", run] if case.scenario is Scenario.STOP else ["tail-logs", "-f", run], run


def _next_commands(site: Site) -> Iterable[str]:
    """What a person types next must work: stop what lives, deploy again, collect everything."""
    # the client or the agent may have gone while a run was launched, which goes on
    wait_until(lambda: bool(site.living_runs()) or not site.supervisors(), "a run that is launched begins")
    yield from _stop_all(site)
    again = ["deploy", "--playbook", "tiny", *_steps(SHORT_STEPS)]
    deployed = site.type(*again)
    deployed.wait()
    if any(event.get("kind") == "busy" for event in deployed.events) and site.living_runs():
        # that run was being launched while we looked: the refusal names it, and says what to type
        yield from _stop_all(site)
        deployed = site.type(*again)
    _ended_well(deployed, again)
    states = {}
    for run in site.runs():
        last = deployed.events[-1]
        if run != last["run"]:
            last = _typed_well(site, "collect", run).events[-1]
        states[run] = str(last["state"])
    yield from after_all(site, states)


def _stop_all(site: Site) -> Iterable[str]:
    for run in site.living_runs():
        stopped = _typed_well(site, "stop", run)
        if stopped.events[-1]["remaining"]:
            yield f"stop left processes: {stopped.events[-1]}"


def _steps(count: int) -> list[str]:
    assert count != TRAINING["steps"]
    return ["--set", f"training.steps={count}"]


def _typed_well(site: Site, *words: str) -> Command:
    """A command over a good link, which must end well."""
    command = site.type(*words)
    _ended_well(command, words)
    return command


def _ended_well(command: Command, words: Sequence[str]) -> None:
    command.wait()
    if command.code != 0:
        errors = [event for event in command.events if event["event"] == "error"]
        raise Stuck(f"`{' '.join(words)}` ended with {command.code}: {errors} {command.err.read_text()}")


def _refuse(site: Site, case: Case, problems: Iterable[str]) -> None:
    found = tuple(itertools.islice(problems, 20))
    if found:
        raise Broken(case, found, site.said())
