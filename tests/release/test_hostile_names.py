"""Source folders, files and patches with names that a shell or git would take for something else."""

from __future__ import annotations

import os
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from dflash_ops.release import ReleaseError, Source, build
from tests.release.trees import repository

FOLDER = "-C a'b\"c $(touch pwned) `touch pwned`;touch pwned"
GOOD = ["-rf", "--help", "a b", "$(touch pwned)", "`touch pwned`;x", "*", "~", "'\"", "ü", ":(glob)x", "x" * 200]
PATCH = """--- a/$(touch pwned)
+++ b/$(touch pwned)
@@ -1 +1 @@
-$(touch pwned)
\\ No newline at end of file
+new
"""
BAD = [b"a\nb", b"a\\b", b"\x1b[2J", b"\xff\xfe", b"\x7f"]


def test_names_are_only_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = repository(tmp_path / FOLDER, {name: name for name in GOOD})
    patch = tmp_path / "-p0 $(touch pwned);x.patch"
    patch.write_text(PATCH)
    release = build(Source(root), [patch], settings={}, out=tmp_path / "out")
    assert sorted(file.path for file in release.manifest.files) == sorted(GOOD)
    assert (release.tree / "$(touch pwned)").read_text() == "new\n"
    with tarfile.open(fileobj=BytesIO(release.archive)) as tar:
        assert sorted(tar.getnames()) == sorted([*GOOD, "manifest.json"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([FOLDER, patch.name, "out"])


@pytest.mark.parametrize("name", BAD)
def test_names_that_no_terminal_or_host_can_take_are_refused(tmp_path: Path, name: bytes) -> None:
    root = repository(tmp_path / "source", {"good.py": "", os.fsdecode(name): "x"})
    with pytest.raises(ReleaseError) as caught:
        build(Source(root), [], settings={}, out=tmp_path / "out")
    assert "name" in caught.value.what
    assert caught.value.where.isprintable()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../out.py", "/tmp/dflash-ops-evil", "a/../../out.py", ".git/hooks/post-checkout"])
def test_a_patch_cannot_write_outside(tmp_path: Path, name: str) -> None:
    root = repository(tmp_path / "source", {"good.py": ""})
    patch = tmp_path / "evil.patch"
    patch.write_text(f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+evil\n")
    with pytest.raises(ReleaseError):
        build(Source(root), [patch], settings={}, out=tmp_path / "out")
    assert not Path("/tmp/dflash-ops-evil").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.patch", "source"]
