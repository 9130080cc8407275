from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.clock import FILE
from tests.faults.sites import Ground
from tests.typist import Typist


@pytest.fixture(scope="session")
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """The rig comes up with the first fault run that needs it."""
    with Typist(clock=FILE) as typist:
        yield Ground(tmp_path_factory.mktemp("faults"), typist, lambda: request.getfixturevalue("rig"))
