"""What the rules found is remembered for exactly what they looked at, and for nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dflash_ops
from dflash_ops.deploy.building import checked
from dflash_ops.deploy.events import Event, Events
from dflash_ops.errors import OpsError
from dflash_ops.release import CheckMemory, Finding, Release, Severity, Source, build
from tests.release.trees import write

BOTH = 'import torch\ntorch.compile(f, mode="default", options={})'
ALLOWED = f"{BOTH}  # dflash: allow[compile-mode-and-options] a test of it\n"


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckMemory:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return CheckMemory.at({"XDG_CACHE_HOME": str(tmp_path / "cache")})


def release_of(folder: Path, text: str) -> Release:
    write(folder / "pkg", {"__init__.py": "", "a.py": text})
    source = Source(path=folder / "pkg", include=("**/*.py",))
    return build(source, [], settings={}, out=folder / f"tree-{len(list(folder.iterdir()))}")


def asked(release: Release, *, anew: bool = False) -> tuple[bool, list[dict[str, Any]]]:
    """Whether it was answered from memory, and what was told."""
    told: list[Event] = []
    try:
        checked(release, Events(told.append), anew=anew)
    except OpsError as error:
        assert (error.kind, int(error.exit_code)) == ("check", 3)
    findings = [event for event in told if event["event"] == "finding"]
    facts = [{key: event[key] for key in event if key not in ("v", "seq", "time")} for event in findings]
    return told[-1]["remembered"], facts


def entry(tmp_path: Path) -> Path:
    (only,) = (tmp_path / "cache" / "dflash-ops" / "checks").iterdir()
    return only


@pytest.mark.parametrize("text", ["x = 1\n", ALLOWED, BOTH, "def f(:\n"])
def test_the_same_content_is_told_the_same_again(tmp_path: Path, text: str) -> None:
    before, first = asked(release_of(tmp_path / "one", text))
    again, second = asked(release_of(tmp_path / "two", text))
    assert (before, again) == (False, True)
    assert second == first
    assert entry(tmp_path).stat().st_mode & 0o777 == 0o600
    # who asks for the check itself gets it
    assert asked(release_of(tmp_path / "three", text), anew=True) == (False, first)


def test_a_changed_file_is_never_answered_from_memory(tmp_path: Path) -> None:
    assert asked(release_of(tmp_path / "a", "x = 1\n")) == (False, [])
    remembered, findings = asked(release_of(tmp_path / "a", BOTH))
    assert not remembered
    assert [finding["rule"] for finding in findings] == ["compile-mode-and-options"]


def test_rules_that_changed_are_asked_again(tmp_path: Path, memory: CheckMemory) -> None:
    release = release_of(tmp_path / "a", "x = 1\n")
    asked(release)
    there = tmp_path / "installed" / "dflash_ops"
    shutil.copytree(Path(dflash_ops.__file__).parent, there, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import os; from dflash_ops.release import CheckMemory; "
        f"print(CheckMemory.at(os.environ).recall({release.digest!r}))"
    )

    def recalled() -> str:
        more = {"PYTHONPATH": str(there.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        argv = [sys.executable, "-c", code]
        done = subprocess.run(argv, env=more, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    # the same rules elsewhere are the same rules
    assert recalled() == "[]"
    rule = there / "release" / "rules" / "silent_eager.py"
    rule.write_text(rule.read_text() + "# another\n")
    assert recalled() == "None"


def spoil_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"findings": []', b'"findings": [ '))


def another_releases(path: Path) -> None:
    kept = json.loads(path.read_text())
    kept["content"]["key"] = "0" * 64
    path.write_text(json.dumps(kept))


def made_up(path: Path) -> None:
    content = {"key": path.stem, "findings": []}
    path.write_text(json.dumps({"sha256": "0" * 64, "content": content}))


def a_link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_a_byte,
        another_releases,
        made_up,
        a_link,
        a_folder,
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"[" * 100_000),
        lambda path: path.write_text("[1, 2]"),
        lambda path: path.chmod(0o666),
    ],
)
def test_a_damaged_or_foreign_entry_counts_as_absent(tmp_path: Path, spoil: Any) -> None:
    release = release_of(tmp_path / "a", "x = 1\n")
    asked(release)
    spoil(entry(tmp_path))
    assert asked(release) == (False, [])


def test_where_nothing_can_be_kept_the_rules_run(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    release = release_of(tmp_path / "a", "x = 1\n")
    assert asked(release) == (False, [])
    assert asked(release) == (False, [])


def test_an_answer_that_is_not_sure_is_not_kept(memory: CheckMemory) -> None:
    memory.keep("0" * 64, [Finding("not-checked", Severity.WARNING, "a.py", 0, "too deep", "split it")])
    assert memory.recall("0" * 64) is None


def test_the_memory_does_not_grow_for_ever(tmp_path: Path, memory: CheckMemory) -> None:
    for number in range(60):
        memory.keep(f"{number:064x}", [])
    assert len(list((tmp_path / "cache" / "dflash-ops" / "checks").iterdir())) == 50
    assert memory.recall(f"{59:064x}") == []
