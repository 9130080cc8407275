"""Compiled objects and the garbage collector are kept apart."""

from __future__ import annotations

import gc

import pytest

from trainer.collector import keep_from_collector, paused_collector


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


def test_what_is_kept_is_never_torn_down() -> None:
    node = Node()
    keep_from_collector()
    del node
    gc.collect()
    assert Node.gone == 0
    gc.unfreeze()
    gc.collect()
    assert Node.gone == 1
