from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import Desk, local_desk


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A workstation that is its own host."""
    return local_desk(tmp_path)
