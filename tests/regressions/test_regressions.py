"""Every fault is stopped, by what the table says and with what it says; the trainer without one is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.regressions.fault import PATCHES, Fault
from tests.regressions.faults import FAULTS
from tests.regressions.harness import (
    Canary,
    ForkServer,
    build_with,
    findings_of,
    run_canary,
    settings_for,
    wrong_in_canary,
    wrong_in_check,
)
from tests.regressions.table import documented_checks
from tests.regressions.workload import prepared_settings

pytestmark = pytest.mark.torch

Json = dict[str, Any]


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trainer as it is, built."""
    return build_with([], tmp_path_factory.mktemp("clean") / "tree").tree


@pytest.fixture(scope="module")
def base(forks: ForkServer, clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Json:
    return prepared_settings(forks, clean, tmp_path_factory.mktemp("workload"), cuda=False)


@pytest.fixture(scope="module")
def clean_canary(forks: ForkServer, clean: Path, base: Json, tmp_path_factory: pytest.TempPathFactory) -> Canary:
    return run_canary(forks, clean, base, tmp_path_factory.mktemp("canary"))


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


def test_without_a_fault_nothing_is_stopped(clean_canary: Canary) -> None:
    assert not clean_canary.stops, clean_canary.log


def test_every_check_is_on_the_page_of_checks(clean_canary: Canary) -> None:
    """Which another test compares with the table of faults."""
    assert clean_canary.evidence is not None
    assert {check["id"] for check in clean_canary.evidence["checks"]} <= documented_checks()


def ops(command: str, *patches: Path) -> tuple[int, list[Json]]:
    """A command of `dflash-ops` on the quickstart with a playbook's `patches`: exit code, events."""
    words = ["--playbook", "quickstart", "--set", f"trainer.patches={json.dumps([str(path) for path in patches])}"]
    done = subprocess.run(
        [sys.executable, "-m", "dflash_ops", command, *words, "--json"],
        env={**os.environ, "PYTHONPATH": str(PATCHES.parents[2])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_playbook_with_the_patch_builds_the_same_release(tmp_path: Path) -> None:
    patch = PATCHES / "update-applied-twice.patch"
    code, events = ops("build", patch)
    assert code == 0, events
    (built,) = (event for event in events if event["event"] == "built")
    assert built["patches"] == [patch.name]
    assert built["release"] == build_with([patch], tmp_path / "tree").digest


def test_a_rule_refuses_the_playbook() -> None:
    code, events = ops("check", PATCHES / "mode-and-options.patch")
    assert code == 3
    (refused,) = (event for event in events if event["event"] == "error")
    assert "it takes one of them" in refused["what"] and refused["where"].startswith("trainer/compile/strategies/")
