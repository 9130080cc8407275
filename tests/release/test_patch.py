"""A diff applies exactly, or the build stops with file, hunk and line."""

from __future__ import annotations

import pytest

from dflash_ops.release.apply import apply_patch
from dflash_ops.release.errors import PatchError
from dflash_ops.release.manifest import TreeFile

Tree = dict[str, TreeFile]


def tree(**files: str) -> Tree:
    """Keys are paths with `__` for `/` and `_dot_` for `.`; all plain files."""
    return {
        name.replace("__", "/").replace("_dot_", "."): TreeFile(text.encode(), 0o644) for name, text in files.items()
    }


def text(result: Tree, path: str) -> str:
    return result[path].data.decode()


def refusal(before: Tree, patch: str | bytes) -> PatchError:
    with pytest.raises(PatchError) as caught:
        apply_patch(before, patch.encode() if isinstance(patch, str) else patch, "x.patch")
    return caught.value


TEN = "".join(f"{number}\n" for number in range(1, 11))
FIVE = "@@ -4,3 +4,3 @@ def f():\n 4\n-5\n+five\n 6\n"


@pytest.mark.parametrize(
    "header",
    [
        "--- a/t/x.py\n+++ b/t/x.py\n",
        "--- t/x.py\n+++ t/x.py\n",
        "--- a/t/x.py\t2026-01-01 00:00:00\n+++ b/t/x.py\t2026-01-01 00:00:00\n",
        "diff --git a/t/x.py b/t/x.py\nindex 1111111..2222222 100644\n--- a/t/x.py\n+++ b/t/x.py\n",
        "diff --git t/x.py t/x.py\nindex 1111111..2222222 100644\n--- t/x.py\n+++ t/x.py\n",
        "diff --git i/t/x.py w/t/x.py\n--- i/t/x.py\n+++ w/t/x.py\n",
        "From 1 Mon Sep\nSubject: five\n\n---\n t/x.py | 2 +-\n\ndiff --git a/t/x.py b/t/x.py\n"
        "--- a/t/x.py\n+++ b/t/x.py\n",
    ],
)
def test_header_forms(header: str) -> None:
    result = apply_patch(tree(t__x_dot_py=TEN), (header + FIVE + "-- \n2.39.5\n\n").encode(), "x.patch")
    assert text(result, "t/x.py") == TEN.replace("5", "five")


def test_the_argument_is_left_alone() -> None:
    before = tree(x=TEN)
    apply_patch(before, f"--- a/x\n+++ b/x\n{FIVE}".encode(), "x.patch")
    assert text(before, "x") == TEN


def test_a_real_folder_named_a_is_no_prefix() -> None:
    result = apply_patch(tree(a__x="1\n"), b"--- a/x\n+++ a/x\n@@ -1 +1 @@\n-1\n+2\n", "x.patch")
    assert text(result, "a/x") == "2\n"
    result = apply_patch(
        {}, b"diff --git b/x b/x\nnew file mode 100644\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+1\n", "p"
    )
    assert list(result) == ["b/x"]


def test_a_hunk_off_by_one_line_says_where_it_would_fit() -> None:
    error = refusal(tree(x="new first line\n" + TEN), f"--- a/x\n+++ b/x\n{FIVE}")
    assert (error.file, error.hunk, error.line) == ("x", 1, 4)
    assert (error.expected, error.found) == ("4\n", "3\n")
    assert "line 5" in error.fix
    assert error.where == "x.patch, x, hunk 1, line 4"


def test_no_fuzz_for_a_changed_context_line() -> None:
    patch = "--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n 1\n-2\n+two\n 3\n" + FIVE.replace(" 6\n", " six\n")
    error = refusal(tree(x=TEN), patch)
    assert (error.hunk, error.line, error.expected, error.found) == (2, 6, "six\n", "6\n")
    assert "nowhere" in error.fix


def test_whitespace_counts() -> None:
    assert refusal(tree(x="a \nb\n"), "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n").line == 1


def test_beyond_the_end_and_before_the_end() -> None:
    beyond = refusal(tree(x="4\n"), f"--- a/x\n+++ b/x\n{FIVE}")
    assert (beyond.line, beyond.found) == (4, None)
    insertion = refusal(tree(x="1\n"), "--- a/x\n+++ b/x\n@@ -5,0 +6 @@\n+1\n")
    assert "the file has 1" in insertion.what
    # context before the change and none behind it: the file ended there when the patch was made
    grown = refusal(tree(x="1\n2\n3\n"), "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n 1\n-2\n+two\n")
    assert (grown.expected, grown.found) == (None, "3\n")


def test_a_patch_that_is_applied_already_says_so() -> None:
    assert "applied" in refusal(tree(x=TEN.replace("5", "five")), f"--- a/x\n+++ b/x\n{FIVE}").fix


def test_overlapping_hunks() -> None:
    assert "overlaps" in refusal(tree(x=TEN), f"--- a/x\n+++ b/x\n{FIVE}{FIVE}").what


def test_no_context_at_all_is_exact_by_its_line() -> None:
    patch = b"--- a/x\n+++ b/x\n@@ -2 +1,0 @@\n-2\n@@ -4,0 +4,2 @@\n+a\n+b\n"
    assert text(apply_patch(tree(x="1\n2\n3\n4\n5\n"), patch, "p"), "x") == "1\n3\n4\na\nb\n5\n"


def test_crlf_is_content() -> None:
    patch = b"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n 1\r\n-2\r\n+two\r\n"
    assert text(apply_patch(tree(x="1\r\n2\r\n"), patch, "p"), "x") == "1\r\ntwo\r\n"
    error = refusal(tree(x="1\n2\n"), patch)
    assert (error.expected, error.found) == ("1\r\n", "1\n")
    assert "CRLF" in error.fix


def test_no_newline_at_the_end_of_the_file() -> None:
    mark = "\\ No newline at end of file\n"
    added = f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n{mark}+1\n"
    assert text(apply_patch(tree(x="1"), added.encode(), "p"), "x") == "1\n"
    removed = f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+1\n{mark}"
    assert text(apply_patch(tree(x="1\n"), removed.encode(), "p"), "x") == "1"
    kept = f"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-1\n+one\n 2\n{mark}"
    assert text(apply_patch(tree(x="1\n2"), kept.encode(), "p"), "x") == "one\n2"
    assert "line end" in refusal(tree(x="1"), "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\n").fix
    assert "line end" in refusal(tree(x="1\n2\n"), f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+one\n{mark}").what
    assert "line end" in refusal(tree(x="1"), "--- a/x\n+++ b/x\n@@ -1,0 +2 @@\n+2\n").what
    assert "end of the file" in refusal(tree(x="1\n2\n"), f"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n 1\n{mark}-2\n+3\n").what


def test_a_patch_file_without_a_last_line_end_is_not_about_the_file() -> None:
    assert text(apply_patch(tree(x="1\n"), b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2", "p"), "x") == "2\n"


def test_new_deleted_renamed_copied_and_chmod() -> None:
    patch = b"""\
diff --git a/new.sh b/new.sh
new file mode 100755
index 0000000..1
--- /dev/null
+++ b/new.sh
@@ -0,0 +1 @@
+run
diff --git a/empty b/empty
new file mode 100644
index 0000000..e69de29
diff --git a/gone b/gone
deleted file mode 100644
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-1
diff --git a/old name b/new name
similarity index 100%
rename from old name
rename to new name
diff --git a/src b/dst
similarity index 50%
copy from src
copy to dst
--- a/src
+++ b/dst
@@ -1 +1 @@
-s
+d
diff --git a/tool b/tool
old mode 100644
new mode 100755
"""
    before = {**tree(gone="1\n", src="s\n", tool="t\n"), "old name": TreeFile(b"n\n", 0o755)}
    assert apply_patch(before, patch, "p") == {
        "new.sh": TreeFile(b"run\n", 0o755),
        "empty": TreeFile(b"", 0o644),
        "new name": TreeFile(b"n\n", 0o755),
        "src": TreeFile(b"s\n", 0o644),
        "dst": TreeFile(b"d\n", 0o644),
        "tool": TreeFile(b"t\n", 0o755),
    }


def test_plain_diffs_make_and_delete_files() -> None:
    patch = b"--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+1\n--- a/g\n+++ /dev/null\n@@ -1 +0,0 @@\n-1\n"
    assert apply_patch(tree(g="1\n"), patch, "p") == tree(n="1\n")


def test_quoted_names() -> None:
    patch = (
        b'diff --git "a/\\303\\251 \\"q\\".py" "b/\\303\\251 \\"q\\".py"\n'
        b'--- "a/\\303\\251 \\"q\\".py"\n+++ "b/\\303\\251 \\"q\\".py"\n@@ -1 +1 @@\n-1\n+2\n'
    )
    name = 'é "q".py'
    assert apply_patch({name: TreeFile(b"1\n", 0o644)}, patch, "p")[name].data == b"2\n"


def test_a_file_that_is_missing_names_the_near_one() -> None:
    error = refusal(tree(trainer__x_dot_py="1\n"), "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-1\n+2\n")
    assert error.file == "x.py"
    assert "trainer/x.py" in error.fix


@pytest.mark.parametrize(
    ("there", "made", "what"), [("x", "x", "there already"), ("d", "d/x", "folder"), ("x/y", "x", "folder")]
)
def test_a_new_file_does_not_replace_what_is_there(there: str, made: str, what: str) -> None:
    patch = f"--- /dev/null\n+++ b/{made}\n@@ -0,0 +1 @@\n+1\n"
    assert what in refusal({there: TreeFile(b"1\n", 0o644)}, patch).what


def test_a_deletion_must_hold_all_of_the_file() -> None:
    patch = "diff --git a/x b/x\ndeleted file mode 100644\n"
    assert apply_patch(tree(x=""), patch.encode(), "p") == {}
    assert "all of it" in refusal(tree(x="1\n"), patch).what


def test_another_mode_than_the_patch_expects() -> None:
    before = {"x": TreeFile(b"1\n", 0o755)}
    assert "0755" in refusal(before, "diff --git a/x b/x\nold mode 100644\nnew mode 100755\n").what


@pytest.mark.parametrize(
    ("patch", "what"),
    [
        ("", "no diff"),
        ("just a note\n", "no diff"),
        ("diff --git a/x b/x\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIcmZ\n", "binary"),
        ("diff --git a/x b/x\nindex 1..2 100644\nBinary files a/x and b/x differ\n", "binary"),
        ("Binary files a/x and b/x differ\n", "binary"),
        ("diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+x\n", "link"),
        ("diff --git a/x b/x\nindex 1..2 120000\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\n", "link"),
        ("diff --git a/s b/s\nindex 1..2 160000\n--- a/s\n+++ b/s\n@@ -1 +1 @@\n-1\n+2\n", "submodule"),
        ("diff --cc x\nindex 1,2..3\n--- a/x\n+++ b/x\n@@@ -1,1 -1,1 +1,1 @@@\n  1\n", "combined"),
        ("diff --git a/x b/x\nindex 1..2 100644\n", "changes nothing"),
        ("--- a/x\n+++ b/x\n", "without a hunk"),
        ("--- a/x\n+++ b/x\n-1\n+2\n", "without an @@"),
        ("@@ -1 +1 @@\n-1\n+2\n", "without the --- and +++"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @\n-1\n+2\n", "malformed"),
        ("--- a/x\n+++ b/x\n@@ -0 +1 @@\n-1\n+2\n", "malformed"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-1\n+2\n", "fewer lines"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\n+3\n", "more lines"),
        ("--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n 1\n 2\n", "add up"),
        ("--- a/x\n+++ b/y\n@@ -1 +1 @@\n-1\n+2\n", "two files"),
        ("--- old/x\n+++ new/x\n@@ -1 +1 @@\n-1\n+2\n", "two files"),
        ("diff --git a/x b/x\n--- a/y\n+++ b/y\n@@ -1 +1 @@\n-1\n+2\n", "do not agree"),
        ("diff --git a/x b/x\n--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-1\n", "do not agree"),
        ("--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-1\n+2\n", "inside the release"),
        ("--- /etc/x\n+++ /etc/x\n@@ -1 +1 @@\n-1\n+2\n", "inside the release"),
        ("--- /dev/null\n+++ b/.git/hooks/x\n@@ -0,0 +1 @@\n+1\n", "inside the release"),
    ],
)
def test_what_is_no_patch_for_a_release(patch: str, what: str) -> None:
    error = refusal(tree(x="1\n", y="1\n"), patch)
    assert what in error.what
    assert "x.patch:" in error.where


def test_a_copy_is_of_the_file_as_it_was_before_the_patch() -> None:
    patch = (
        "diff --git a/a.py b/a.py\nold mode 100644\nnew mode 100755\n"
        "diff --git a/a.py b/b.py\nsimilarity index 100%\ncopy from a.py\ncopy to b.py\n"
    )
    made = apply_patch({"a.py": TreeFile(b"x\n", 0o644)}, patch.encode(), "p")
    assert made == {"a.py": TreeFile(b"x\n", 0o755), "b.py": TreeFile(b"x\n", 0o644)}
