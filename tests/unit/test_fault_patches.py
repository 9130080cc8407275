"""Every fault of the tiny trainer is a patch that dflash-ops itself applies: at exactly its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ops.release.apply import apply_patch
from dflash_ops.release.manifest import TreeFile
from tests.commands import FAULTS, TINY


@pytest.mark.parametrize("patch", sorted(FAULTS.glob("*.patch")), ids=lambda path: path.stem)
def test_it_applies_to_the_trainer_as_it_is(patch: Path) -> None:
    files = [path for path in TINY.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    tree = {str(path.relative_to(TINY.parent)): TreeFile(path.read_bytes(), 0o644) for path in files}
    assert apply_patch(tree, patch.read_bytes(), patch.name) != tree
