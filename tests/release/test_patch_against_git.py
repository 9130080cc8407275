"""Our applier and `git apply` agree on edits made at random."""

from __future__ import annotations

import difflib
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_ops.release.apply import apply_patch
from dflash_ops.release.errors import PatchError
from dflash_ops.release.manifest import TreeFile
from tests.release.trees import commit, git, repository, write

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

MARK = "\\ No newline at end of file\n"
# few different lines, so that hunks fit at several places; CRLF and empty lines are content
LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n", "-x\n", "+x\n", "d\r\n", " \n"]), max_size=14)
ENDS = st.sampled_from(["", "last", "\\ odd"])
SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, str]:
    """A text and one made from it by a few edits."""
    lines = draw(LINES)
    old = "".join(lines) + draw(ENDS)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(lines)))
        lines[at : at + draw(st.integers(0, 2))] = draw(LINES)[:3]
    return old, "".join(lines) + draw(ENDS)


def difference(old: str, new: str, context: int) -> str:
    """A diff as `diff -u` writes it; difflib knows nothing of missing line ends."""
    parts = [text.replace("\n", "\n\0").split("\0") for text in (old, new)]
    parts = [[line for line in part if line] for part in parts]
    out = difflib.unified_diff(*parts, "a/f", "b/f", n=context)
    return "".join(line if line.endswith("\n") else f"{line}\n{MARK}" for line in out)


def ours(content: str, patch: str) -> bytes | None:
    try:
        return apply_patch({"f": TreeFile(content.encode(), 0o644)}, patch.encode(), "p")["f"].data
    except PatchError:
        return None


def gits(content: str, patch: str) -> bytes | None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), {"f": content})
        done = git(Path(folder), "apply", "--whitespace=nowarn", "--unidiff-zero", "-", stdin=patch.encode())
        return (Path(folder) / "f").read_bytes() if done.returncode == 0 else None


@SETTINGS
@given(edits(), st.sampled_from([0, 1, 3]))
def test_a_patch_made_from_the_file_gives_the_same_bytes_as_git(edit: tuple[str, str], context: int) -> None:
    old, new = edit
    patch = difference(old, new, context)
    if patch:
        assert ours(old, patch) == new.encode()
        assert gits(old, patch) == new.encode()


@SETTINGS
@given(edits(), edits())
def test_on_another_file_we_apply_only_what_git_applies_too(edit: tuple[str, str], other: tuple[str, str]) -> None:
    patch = difference(*edit, 2)
    for content in (edit[1], other[0], "a\n" + edit[0], edit[0] + "a\n"):
        mine = ours(content, patch) if patch else None
        if mine is not None:
            assert mine == gits(content, patch)


NAMES = ["a.py", "b.py", "d/a.py", "d/e/é.py", "name with blanks", 'q"uote', "b", "b/x"]
FILES = st.dictionaries(
    st.sampled_from(NAMES),
    st.sampled_from(["", "1\n", "1\n2\n3\n4\n5\n", "1\n2\n3\n4\n6\n", "1\n2", "x\r\ny\r\n"]),
    max_size=6,
).filter(lambda files: not {"b", "b/x"} <= files.keys())


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(FILES, FILES, st.sets(st.sampled_from(NAMES)), st.sampled_from(["--no-prefix", "-U1", "-M", "-C"]))
def test_what_git_diff_writes_between_two_trees_turns_one_into_the_other(
    before: dict[str, str], after: dict[str, str], executable: set[str], option: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        repo = repository(Path(folder), before)
        first = commit(repo)
        assert not before or git(repo, "rm", "-r", "-q", ".").returncode == 0
        write(repo, after)
        for name in executable & after.keys():
            (repo / name).chmod(0o755)
        second = commit(repo)
        patch = git(repo, "diff", "-M", option, first, second).stdout
    start = {name: TreeFile(text.encode(), 0o644) for name, text in before.items()}
    end = {name: TreeFile(text.encode(), 0o755 if name in executable else 0o644) for name, text in after.items()}
    if patch:
        assert apply_patch(start, patch, "p") == end
    else:
        assert start == end
