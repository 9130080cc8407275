"""The wheel: what a user without a checkout gets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tracked files, unpacked."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in tracked.stdout.decode().split("\0"):
        # deleted but not yet committed files are still listed
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    # what a run of the trainer leaves behind must not travel
    (source / "trainer/__pycache__").mkdir()
    (source / "trainer/__pycache__/x.cpython-311.pyc").write_bytes(b"")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(home), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = home.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home / "unpacked")
    return home / "unpacked"


def relative_files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("name", ["trainer", "playbooks", "hosts"])
def test_bundled_folders_are_whole(unpacked: Path, name: str) -> None:
    assert relative_files(unpacked / "dflash_ops/_bundled" / name) == relative_files(ROOT / name)
    assert not list(unpacked.rglob("*.pyc"))


def test_schemas_license_and_the_command_are_there(unpacked: Path) -> None:
    for name in ("host", "playbook"):
        assert (unpacked / f"dflash_ops/config/schema/{name}.schema.json").is_file()
    (info,) = unpacked.glob("dflash_ops-*.dist-info")
    assert "dflash-ops = dflash_ops.__main__:main" in (info / "entry_points.txt").read_text()
    assert "Apache License" in (info / "licenses/LICENSE").read_text()
    metadata = (info / "METADATA").read_text()
    base = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert base
    assert not [line for line in base if "torch" in line]


def test_playbooks_and_hosts_load_from_the_wheel_in_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    code = (
        "from dflash_ops.config import bundled, load_host, load_playbook\n"
        "assert load_playbook('quickstart', sets=['steps=3']).training.steps == 3\n"
        "host, why = load_host(None, None, env={}, last_host=None)\n"
        "print(bundled('trainer'), host.name, why, sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        str(unpacked / "dflash_ops/_bundled/trainer"),
        "local",
        "the only host: no inventory was found",
    ]
