"""Compiled objects and the garbage collector are kept apart."""

from __future__ import annotations

import gc

import pytest

from trainer.collector import paused_collector
from trainer.compile import steady_phase


class Node:
    """Part of a cycle that only the collector could take down."""

    gone = 0

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        Node.gone += 1


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Node.gone = 0


def test_paused_inside_the_block_only() -> None:
    assert gc.isenabled()
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_no_collection_before_the_steady_phase() -> None:
    with steady_phase() as begin:
        assert not gc.isenabled()
        begin()
        assert gc.isenabled()
    assert gc.isenabled()


def test_a_phase_that_never_began_gives_the_collector_back() -> None:
    with pytest.raises(RuntimeError, match="a worker"), steady_phase():
        raise RuntimeError("a worker failed while it was built")
    assert gc.isenabled()


def test_what_was_built_and_what_workers_leave_is_never_torn_down() -> None:
    with steady_phase() as begin:
        built = Node()
        begin()
        del built
        gc.collect()
        assert Node.gone == 0
        between = Node()
        del between
        gc.collect()
        assert Node.gone == 1, "only what was compiled is kept"
        left = Node()
        del left
    gc.collect()
    assert Node.gone == 1
    gc.unfreeze()
    gc.collect()
    assert Node.gone == 3
