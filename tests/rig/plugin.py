"""The `rig` fixture: import it into a conftest, or name this module in `pytest_plugins`. One rig a test process."""

from __future__ import annotations

import pytest

from tests.rig import requirements
from tests.rig.rig import Rig

_RIG = pytest.StashKey[Rig]()


@pytest.fixture(scope="session")
def rig(request: pytest.FixtureRequest) -> Rig:
    """The node with its containers, up; skips with the reason where this machine cannot hold it."""
    stash = request.config.stash
    if _RIG not in stash:
        reason = requirements.missing()
        if reason is not None:
            pytest.skip(reason)
        started = Rig()
        try:
            started.up()
        except BaseException:
            started.down()
            raise
        request.config.add_cleanup(started.down)
        stash[_RIG] = started
    return stash[_RIG]
