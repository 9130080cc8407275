"""Syntax under the target's Python, suppression, and how findings look."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dflash_ops.release import ReleaseError, check, finding_dict, finding_text
from tests.release.trees import write

BOTH = 'import torch\ntorch.compile(f, mode="default", options={})'
RULE = "compile-mode-and-options"


@pytest.mark.parametrize("python", [None, sys.executable])
@pytest.mark.parametrize(
    ("source", "line"), [("x = 1\ndef f(:\n", 2), ("x = '\0'\n", None), (b"x = '\xff'\n", None), ("  x = 1\n", 1)]
)
def test_syntax_errors(tmp_path: Path, python: str | None, source: str | bytes, line: int | None) -> None:
    write(tmp_path, {"pkg/bad.py": source, "pkg/good.py": "x = 1\n", "notes.txt": "def f(:"})
    (finding,) = check(tmp_path, python=python)
    assert (finding.rule, finding.path, finding.blocks) == ("syntax", "pkg/bad.py", True)
    assert line is None or finding.line == line


def interpreter(tmp_path: Path, body: str) -> str:
    """An interpreter with a syntax of its own: this one, behind a script that changes what it says."""
    place = tmp_path / "python"
    place.write_text(f"#!/bin/sh\n{body}\n")
    place.chmod(0o755)
    return str(place)


def test_the_syntax_is_the_one_of_the_named_interpreter(tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", {"a.py": "x = 1\n", "b.py": "def f(:\n"})
    answer = json.dumps({str(tree / "a.py"): [7, "too new"]})
    findings = check(tree, python=interpreter(tmp_path, f"cat >/dev/null; echo '{answer}'"))
    assert [(finding.path, finding.line, finding.rule) for finding in findings] == [
        ("a.py", 7, "syntax"),
        # right for the target, unreadable here: said, and not passed over
        ("b.py", 1, "not-checked"),
    ]
    assert not findings[1].blocks


def test_checking_leaves_no_bytecode_in_the_tree(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "x = 1\n"})
    assert check(tmp_path, python=sys.executable) == []
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]


def test_an_interpreter_that_is_missing_or_fails(tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", {"a.py": "x = 1\n"})
    with pytest.raises(ReleaseError, match="cannot check syntax"):
        check(tree, python=str(tmp_path / "nowhere/python3"))
    with pytest.raises(ReleaseError, match="exit code 3: broken"):
        check(tree, python=interpreter(tmp_path, "echo broken >&2; exit 3"))
    with pytest.raises(ReleaseError, match="no such folder"):
        check(tmp_path / "none", python=None)


def test_a_reason_suppresses_and_stays_visible(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": f"{BOTH}  # dflash: allow[{RULE}] this wrapper drops the mode\n"})
    (finding,) = check(tmp_path, python=None)
    assert finding.suppressed == "this wrapper drops the mode"
    assert not finding.blocks
    assert "allowed" in finding_text(finding)
    assert "this wrapper drops the mode" in finding_text(finding)


def test_without_a_reason_the_finding_stays_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": f"{BOTH}  # dflash: allow[{RULE}]\n"})
    (finding,) = check(tmp_path, python=None)
    assert finding.blocks
    assert "without a reason" in finding.fix


@pytest.mark.parametrize(
    "source",
    [
        f"{BOTH}  # dflash: allow[private-tls-stash] another rule\n",
        f"# dflash: allow[{RULE}] another line\n{BOTH}\n",
        f'{BOTH}; x = "# dflash: allow[{RULE}] in a string"\n',
    ],
)
def test_what_does_not_suppress(tmp_path: Path, source: str) -> None:
    write(tmp_path, {"a.py": source})
    (finding,) = check(tmp_path, python=None)
    assert finding.blocks


def test_a_comment_on_any_line_of_the_call_and_for_several_rules(tmp_path: Path) -> None:
    source = (
        'import torch\ntorch.compile(\n    f,\n    mode="default",\n'
        f"    options={{}},  # dflash: allow[private-tls-stash, {RULE}] for a reason\n)\n"
    )
    write(tmp_path, {"a.py": source})
    (finding,) = check(tmp_path, python=None)
    assert (finding.line, finding.suppressed) == (2, "for a reason")


def test_findings_are_ordered_and_look_alike_for_people_and_machines(tmp_path: Path) -> None:
    write(tmp_path, {"b.py": BOTH, "a/z.py": f"\n{BOTH}", "a/a.py": BOTH})
    findings = check(tmp_path, python=None)
    assert [(finding.path, finding.line) for finding in findings] == [("a/a.py", 2), ("a/z.py", 3), ("b.py", 2)]
    first, fix = finding_text(findings[0]).split("\n")
    assert first.startswith(f"a/a.py:2: error[{RULE}]: torch.compile gets mode and options")
    assert fix.startswith("  fix: ")
    assert json.loads(json.dumps(finding_dict(findings[0]))) == {
        "rule": RULE,
        "severity": "error",
        "path": "a/a.py",
        "line": 2,
        "why": findings[0].why,
        "fix": findings[0].fix,
        "suppressed": None,
        "blocks": True,
    }


def test_an_expression_too_deep_to_read_is_said_not_to_be_checked(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "x = " + "+".join(["1"] * 900) + "\n"})
    (finding,) = check(tmp_path, python=None)
    assert (finding.rule, finding.blocks) == ("not-checked", False)
