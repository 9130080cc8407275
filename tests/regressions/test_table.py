"""The table of faults: whole, and the page that people read is it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dflash_ops.release.rules import RULES
from tests.regressions.fault import PATCHES
from tests.regressions.faults import FAULTS, NO_FAULT
from tests.regressions.refresh import ROOT, StaleError, refreshed
from tests.regressions.table import README, documented_checks, render


def test_the_page_is_the_table() -> None:
    assert README.read_text() == render(), "python -m tests.regressions.table"


def test_every_patch_is_in_the_table_once() -> None:
    assert sorted(fault.name for fault in FAULTS) == sorted(path.stem for path in PATCHES.iterdir())


def test_every_fault_is_stopped_by_something() -> None:
    """By a rule that refuses the build or by a check that fails: a warning goes on."""
    assert [fault.name for fault in FAULTS if not fault.refused] == []


def test_what_is_seen_on_a_gpu_concerns_cuda() -> None:
    assert [fault.name for fault in FAULTS if fault.cuda and not fault.gpus] == []


def test_every_rule_has_a_fault_that_it_alone_finds() -> None:
    alone = {fault.rule.id for fault in FAULTS if fault.rule is not None and fault.rule.alone}
    assert alone == {rule.id for rule in RULES} | {"syntax"}


def test_every_check_has_a_fault_that_it_alone_stops() -> None:
    checks = [check for fault in FAULTS for check in (fault.cpu, fault.cuda) if check is not None]
    assert {check.id for check in checks} <= documented_checks()
    alone = {check.id for check in checks if check.alone}
    assert sorted(documented_checks() - alone - NO_FAULT.keys()) == []
    assert sorted({check.id for check in checks} & NO_FAULT.keys()) == []


@pytest.mark.parametrize("check", NO_FAULT)
def test_a_check_without_a_fault_has_a_test_of_its_own(check: str) -> None:
    file, _, name = NO_FAULT[check].test.partition("::")
    source = ast.parse((ROOT / "tests" / "trainer" / file).read_text())
    assert name in {node.name for node in source.body if isinstance(node, ast.FunctionDef)}


PATCH = """\
--- a/trainer/code.py
+++ b/trainer/code.py
@@ -1,2 +1,3 @@
 first
+added
 second
@@ -4,2 +5,2 @@
 third
-fourth
+changed
"""


def test_hunks_move_to_where_their_lines_are(tmp_path: Path) -> None:
    file = tmp_path / "trainer" / "code.py"
    file.parent.mkdir()
    file.write_text("new\nfirst\nsecond\nother\nother\nthird\nfourth\n")
    moved = PATCH.replace("@@ -1,2 +1,3 @@", "@@ -2,2 +2,3 @@").replace("@@ -4,2 +5,2 @@", "@@ -6,2 +7,2 @@")
    assert refreshed(PATCH, tmp_path) == moved
    assert refreshed(moved, tmp_path) == moved


@pytest.mark.parametrize(("content", "places"), [("first\nsecond\nthird\n", 0), ("first\nsecond\n" * 2, 2)])
def test_a_hunk_without_one_place_is_named(tmp_path: Path, content: str, places: int) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "code.py").write_text(content)
    with pytest.raises(StaleError, match=f"{places} places for the hunk"):
        refreshed(PATCH, tmp_path)
