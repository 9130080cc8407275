"""What tests/conftest.py promises: in CI a rig or torch test that skips is a failure; the order of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


SKIPS = """
import pytest

@pytest.mark.rig
def test_rig():
    pytest.skip("no lxc here")

@pytest.mark.torch
def test_torch():
    pytest.skip("no torch here")

@pytest.mark.rig
@pytest.mark.xfail
def test_expected():
    assert False

def test_other():
    pytest.skip("no python3.9 here")
"""


GPU = """
import pytest

@pytest.mark.torch
@pytest.mark.cuda(99)
def test_gpu():
    assert False
"""


def run(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_skips.py").write_text(SKIPS)
    (folder / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    return started(folder, **env)


def started(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    without_ci = {key: value for key, value in os.environ.items() if key != "CI"}
    return subprocess.run(
        [*command, "--continue-on-collection-errors", str(folder)],
        cwd=ROOT,
        env={**without_ci, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_in_ci_a_skipped_rig_or_torch_test_or_module_fails_with_its_reason(tmp_path: Path) -> None:
    done = run(tmp_path, CI="true")
    assert done.returncode == 1
    assert "2 failed, 1 skipped, 1 xfailed, 1 error" in done.stdout
    assert "a test marked rig must run in CI, it skipped: Skipped: no lxc here" in done.stdout
    assert "a test marked torch must run in CI, it skipped: Skipped: no torch here" in done.stdout
    assert "no_such_module" in done.stdout


def test_elsewhere_they_skip(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0
    assert "4 skipped, 1 xfailed" in done.stdout


@pytest.mark.torch
def test_in_ci_a_test_that_needs_a_gpu_may_skip(tmp_path: Path) -> None:
    (tmp_path / "test_gpu.py").write_text(GPU)
    done = started(tmp_path, CI="true")
    assert done.returncode == 0, done.stdout
    assert "needs 99 CUDA GPUs" in done.stdout and "1 skipped" in done.stdout


def test_order_is_unit_contract_rig_trainer_and_slow_last() -> None:
    from tests import conftest

    class Item:
        def __init__(self, name: str, slow: bool = False) -> None:
            self.path = ROOT / "tests" / name
            self.slow = slow

        def get_closest_marker(self, name: str) -> bool | None:
            return True if name == "slow" and self.slow else None

        def add_marker(self, mark: pytest.MarkDecorator) -> None:
            self.slow = self.slow or mark.name == "slow"

    items = [
        Item("trainer/t.py"),
        Item("rig/t.py"),
        Item("config/slow.py", slow=True),
        Item("contract/t.py"),
        Item("agent/t.py"),
        Item("config/t.py"),
    ]
    conftest.pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    assert [str(item.path.relative_to(ROOT / "tests")) for item in items] == [
        "config/t.py",
        "config/slow.py",
        "agent/t.py",
        "contract/t.py",
        "rig/t.py",
        "trainer/t.py",
    ]
