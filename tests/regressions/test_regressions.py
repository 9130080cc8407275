"""Every fault is stopped, by what the table says and with what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.regressions.fault import Fault
from tests.regressions.faults import FAULTS
from tests.regressions.harness import (
    ForkServer,
    build_with,
    findings_of,
    run_canary,
    settings_for,
    wrong_in_canary,
    wrong_in_check,
)
from tests.regressions.workload import prepared_settings

pytestmark = pytest.mark.torch

Json = dict[str, Any]


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def base(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Json:
    folder = tmp_path_factory.mktemp("base")
    build_with([], folder / "tree")
    return prepared_settings(forks, folder / "tree", folder / "workload", cuda=False)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=fault.name, marks=[pytest.mark.compiles] if fault.compiles else []) for fault in FAULTS],
)
def test_a_fault_is_stopped(fault: Fault, forks: ForkServer, base: Json, tmp_path: Path) -> None:
    release = build_with([fault.patch], tmp_path / "tree")
    wrong = wrong_in_check(fault.rule, findings_of(release))
    assert wrong is None, wrong
    if fault.cpu is None:
        return
    (tmp_path / "canary").mkdir()
    canary = run_canary(forks, release.tree, settings_for(fault, base), tmp_path / "canary")
    wrong = wrong_in_canary(fault.cpu, canary)
    assert wrong is None, f"{wrong}\n{canary.log}"


def test_the_trainer_without_a_fault_is_not_stopped(forks: ForkServer, base: Json, tmp_path: Path) -> None:
    release = build_with([], tmp_path / "tree")
    assert findings_of(release) == []
    (tmp_path / "canary").mkdir()
    canary = run_canary(forks, release.tree, base, tmp_path / "canary")
    assert not canary.stops, canary.log
