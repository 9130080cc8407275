"""For all tests: their order, what a skip means in CI, and no look at the inventory of the person who runs them."""

from __future__ import annotations

import os
import secrets
import shutil
import sysconfig
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

# no test is judged by time: a loaded machine would fail it; in CI the examples are the same each time
hypothesis.settings.register_profile(
    "ours", deadline=None, derandomize=os.environ.get("CI", "").lower() == "true", database=None
)
hypothesis.settings.load_profile("ours")

pytest_plugins = ["tests.rig.plugin"]

HERE = Path(__file__).parent
# what breaks first and fastest comes first: everything else in tests/ is unit tests, which come before these
LATER = ("agent", "deploy", "contract", "rig", "faults", "trainer", "regressions")
# each test there starts processes of its own: not for the fast first run
SLOW_FOLDERS = ("agent", "deploy", "contract", "faults")
NEVER_SKIPPED_IN_CI = ("rig", "torch")


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() == "true"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("compiles"):
        headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
        if not (shutil.which("g++") or shutil.which("c++")) or not headers.exists():
            pytest.skip("torch.compile on a CPU needs a C++ compiler and Python's headers (apt: g++, python3-dev)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _folder(item.path) in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
        if (cuda := item.get_closest_marker("cuda")) is not None:
            _needs_gpus(item, *cuda.args)
    items.sort(key=lambda item: (_group(item.path), item.get_closest_marker("slow") is not None))


def _needs_gpus(item: pytest.Item, wanted: int = 1) -> None:
    import torch

    if (there := torch.cuda.device_count()) < wanted:
        item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA GPUs, {there} are here"))


def _folder(path: Path) -> str:
    return path.relative_to(HERE).parts[0] if path.is_relative_to(HERE) else ""


def _group(path: Path) -> int:
    folder = _folder(path)
    return LATER.index(folder) + 1 if folder in LATER else 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marks = [mark for mark in NEVER_SKIPPED_IN_CI if item.get_closest_marker(mark)]
    if item.get_closest_marker("cuda"):
        # CI has no GPU: what is marked so is run by hand where there is one
        return report
    if report.skipped and not hasattr(report, "wasxfail") and marks and in_ci():
        _fail(report, f"a test marked {' and '.join(marks)} must run in CI, it skipped")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    # a whole module that skips (importorskip) has no items whose marks could be asked
    if report.outcome == "skipped" and in_ci():
        _fail(report, "a whole module skipped, in CI every module must be there")
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport, why: str) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{why}: {reason}"


@pytest.fixture(scope="session")
def _empty_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


@pytest.fixture(autouse=True)
def _no_personal_config(_empty_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_OPS_HOST", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(_empty_config))
    # a ledger of its own for each test, made when it is used
    monkeypatch.setenv("XDG_STATE_HOME", str(_empty_config / secrets.token_hex(8)))
