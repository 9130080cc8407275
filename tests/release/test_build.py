"""A release is its content: digest, manifest and archive."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from dflash_ops.release import Release, ReleaseError, Source, build
from tests.release.trees import git, repository, write

LONG = "deep/" * 60 + "é.py"
FILES = {"trainer/__init__.py": "", "trainer/a.py": "A = 1\n", f"trainer/{LONG}": "é = 1\n"}
PATCH = "--- a/trainer/a.py\n+++ b/trainer/a.py\n@@ -1 +1 @@\n-A = 1\n+A = 2\n"


def patched(folder: Path, repo: Path) -> Release:
    patch = folder / "one.patch"
    patch.parent.mkdir(parents=True, exist_ok=True)
    patch.write_text(PATCH)
    return build(Source(repo / "trainer"), [patch], settings={"steps": 1}, out=folder / "out")


def test_two_builds_are_byte_identical_whatever_the_folder_the_umask_and_the_time(tmp_path: Path) -> None:
    repo = repository(tmp_path / "one/repo", FILES)
    first = patched(tmp_path / "one", repo)

    before = os.umask(0o077)
    try:
        other = tmp_path / "elsewhere/other name"
        assert git(tmp_path, "clone", "-q", str(repo), str(other)).returncode == 0
        for path in (other / "trainer").rglob("*"):
            os.utime(path, (1, 1))
        second = patched(tmp_path / "two", other)
    finally:
        os.umask(before)
    assert second.archive == first.archive
    assert second.digest == first.digest
    assert (second.tree / "manifest.json").read_bytes() == (first.tree / "manifest.json").read_bytes()
    assert (second.tree / "trainer/a.py").stat().st_mode & 0o777 == 0o644


def test_another_process_with_another_hash_seed_packs_the_same_bytes(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", FILES)
    mine = build(Source(repo), [], settings={"b": 1, "a": {"y": 1, "x": 2}}, out=tmp_path / "out")
    code = (
        "import sys, pathlib; from dflash_ops.release import Source, build\n"
        "r = build(Source(pathlib.Path(sys.argv[1])), [], settings={'a': {'x': 2, 'y': 1}, 'b': 1},"
        " out=pathlib.Path(sys.argv[2]))\n"
        "sys.stdout.buffer.write(r.archive)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(repo), str(tmp_path / "out2")],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == mine.archive


def test_the_archive_holds_the_manifest_first_and_exactly_its_files(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", FILES)
    (repo / "trainer/a.py").chmod(0o755)
    release = patched(tmp_path, repo)
    assert release.archive[4:8] == b"\0\0\0\0"  # gzip's time
    with tarfile.open(fileobj=io.BytesIO(release.archive)) as tar:
        members = tar.getmembers()
        contents = {member.name: tar.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    assert members[0].name == "manifest.json"
    manifest = json.loads(contents["manifest.json"])
    assert [member.name for member in members[1:]] == [file["path"] for file in manifest["files"]]
    assert [file["path"] for file in manifest["files"]] == sorted(FILES)
    for member, file in zip(members[1:], manifest["files"], strict=True):
        data = contents[member.name]
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size"], file["sha256"])
        assert member.mode == file["mode"]
        assert (release.tree / member.name).read_bytes() == data
    assert {member.mtime for member in members} == {0}
    assert {(member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, "", "")}
    assert contents["trainer/a.py"] == b"A = 2\n"
    assert (release.tree / "trainer/a.py").stat().st_mode & 0o777 == 0o755


def test_the_manifest_says_what_the_release_was_made_of(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", FILES)
    release = patched(tmp_path, repo)
    manifest = json.loads((release.tree / "manifest.json").read_text())
    canonical = json.dumps(manifest["files"], sort_keys=True, separators=(",", ":"))
    assert manifest["v"] == 1
    assert manifest["digest"] == release.digest == hashlib.sha256(canonical.encode()).hexdigest()
    assert manifest["patches"] == [{"name": "one.patch", "sha256": hashlib.sha256(PATCH.encode()).hexdigest()}]
    assert manifest["settings_sha256"] == hashlib.sha256(b'{"steps":1}').hexdigest()
    assert manifest["source"]["kind"] == "git"
    assert str(tmp_path) not in gzip.decompress(release.archive).decode("utf-8", "replace")


def test_the_digest_depends_on_content_and_mode_only(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", FILES)
    first = build(Source(repo), [], settings={"steps": 1}, out=tmp_path / "1")
    git(repo, "commit", "-q", "--allow-empty", "-m", "another commit")
    again = build(Source(repo), [], settings={"steps": 2}, out=tmp_path / "2")
    assert again.digest == first.digest
    (repo / "trainer/a.py").chmod(0o755)
    mode = build(Source(repo), [], settings={}, out=tmp_path / "3")
    write(repo, {"trainer/a.py": "A = 3\n"})
    content = build(Source(repo), [], settings={}, out=tmp_path / "4")
    assert len({first.digest, mode.digest, content.digest}) == 3


def test_the_release_runs_as_a_module_from_its_root(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"trainer/__main__.py": "print('ran')\n", "trainer/__init__.py": ""})
    release = build(Source(repo / "trainer"), [], settings={}, out=tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-m", "trainer"],
        cwd=release.tree,
        env={"PYTHONPATH": str(release.tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"ran\n"


def test_patches_apply_in_their_order(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"a.py": "1\n"})
    for name, old, new in (("one", 1, 2), ("two", 2, 3)):
        (tmp_path / name).write_text(f"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-{old}\n+{new}\n")
    release = build(Source(repo), [tmp_path / "one", tmp_path / "two"], settings={}, out=tmp_path / "out")
    assert (release.tree / "a.py").read_text() == "3\n"
    with pytest.raises(ReleaseError, match="does not match"):
        build(Source(repo), [tmp_path / "two", tmp_path / "one"], settings={}, out=tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


def test_out_must_be_fresh_and_what_lies_there_is_left_alone(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"a.py": "1\n"})
    out = write(tmp_path / "out", {"mine.txt": "keep"})
    with pytest.raises(ReleaseError, match="not an empty folder"):
        build(Source(repo), [], settings={}, out=out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    shutil.rmtree(out)
    out.mkdir()
    build(Source(repo), [], settings={}, out=out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "repo"]


def test_a_missing_patch_a_manifest_of_their_own_and_settings_that_json_cannot_hold(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {"a.py": "1\n", "sub/manifest.json": "{}"})
    with pytest.raises(ReleaseError, match="cannot be read"):
        build(Source(repo), [tmp_path / "none.patch"], settings={}, out=tmp_path / "out")
    with pytest.raises(ReleaseError, match="manifest"):
        build(Source(repo / "sub"), [], settings={}, out=tmp_path / "out")
    with pytest.raises(ReleaseError, match="JSON"):
        build(Source(repo), [], settings={"x": float("nan")}, out=tmp_path / "out")
