"""What the drawn cases meet, before any of them is run: a fault that strikes at one stage alone finds little."""

from __future__ import annotations

import itertools

import pytest

from tests.faults.cases import FAULTS, PLACES, Fault, Scenario, dealt, draw, scenarios_of
from tests.faults.sites import WAYS
from tests.faults.test_fault_runs import IN_CI

PAIRS = {(fault, way) for way, faults in FAULTS.items() for fault in faults}
STAGES = set(itertools.product(Scenario, WAYS))


def test_thirty_runs_in_ci_take_each_stage_over_each_way() -> None:
    cases = [draw(seed) for seed in IN_CI]
    assert len(cases) == 30
    assert {(case.scenario, case.way) for case in cases} == STAGES
    # as many pairs as there are runs, and no kind of fault without one
    assert len({(case.fault, case.way) for case in cases} & PAIRS) == len(cases)
    assert {case.fault for case in cases} == set(Fault)


def test_deploys_in_ci_are_struck_at_every_place_of_a_deploy() -> None:
    deploys = [case for case in map(draw, IN_CI) if case.scenario is Scenario.DEPLOY]
    assert {case.place.event for case in deploys} == set(PLACES[Scenario.DEPLOY])


@pytest.mark.parametrize("first", [0, 1, 200, 1000])
def test_two_hundred_runs_meet_every_fault_on_every_way(first: int) -> None:
    cases = [draw(dealt(number)) for number in range(first, first + 200)]
    assert {(case.fault, case.way) for case in cases} == PAIRS
    assert {(case.scenario, case.way) for case in cases} == STAGES
    for fault in Fault:
        met = {case.scenario for case in cases if case.fault is fault}
        assert met == set(scenarios_of(fault)), fault


def test_a_place_that_is_drawn_again_is_of_the_same_way_fault_and_scenario() -> None:
    for number, again in itertools.product(range(48), range(1, 4)):
        seed = dealt(number)
        one, other = draw(seed), draw(f"{seed}/{again}")
        assert (one.way, one.fault, one.scenario) == (other.way, other.fault, other.scenario)
