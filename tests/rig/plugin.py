"""The `rig` fixture, one rig a test process; `tests/conftest.py` names this module in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rig import requirements
from tests.rig.rig import Rig


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    """The node with its containers, up; skips with the reason where this machine cannot hold it."""
    reason = requirements.missing()
    if reason is not None:
        pytest.skip(reason)
    started = Rig()
    try:
        started.up()
        yield started
    finally:
        started.down()
