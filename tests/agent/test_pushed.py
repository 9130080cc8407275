"""An archive that comes in pieces beside the conversation: each counts once it is whole, the next command goes on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import Agent, AgentFailed, Packed, pack
from tests.agent.test_uploads import arriving, wanted

PIECE = 250_000


@pytest.fixture
def big() -> Packed:
    return pack({"pkg/__init__.py": b"", "pkg/noise.bin": os.urandom(600_000)})


def begin(agent: Agent, release: Packed) -> dict[str, Any]:
    result: dict[str, Any] = agent.call("archive_begin", digest=release.digest, size=len(release.archive)).result
    return result


def announce(agent: Agent, release: Packed, start: int) -> int:
    """Says that the piece from `start` on has been put there."""
    piece = release.archive[start : start + PIECE]
    told = {"from": start, "size": len(piece), "sha256": hashlib.sha256(piece).hexdigest()}
    return int(agent.call("archive_piece", digest=release.digest, **told).result["from"])


def put(agent: Agent, release: Packed, start: int, place: str) -> int:
    Path(place).write_bytes(release.archive[start : start + PIECE])
    return announce(agent, release, start)


def names(work: Path) -> list[str]:
    return sorted(path.name for path in (work / "releases").iterdir())


def test_it_goes_on_after_the_pieces_that_another_conversation_has_brought(work: Path, big: Packed) -> None:
    with Agent(work) as agent:
        begun = begin(agent, big)
        assert begun["from"] == 0
        assert put(agent, big, 0, begun["piece"]) == PIECE
        # the next one is only half there when the client goes
        Path(begun["piece"]).write_bytes(big.archive[PIECE : PIECE + 1000])
    with Agent(work) as agent:
        agent.call("lock", owner="ann@desk", command="deploy")
        begun = begin(agent, big)
        assert begun["from"] == PIECE
        assert begun["sha256"] == hashlib.sha256(big.archive[:PIECE]).hexdigest()
        for start in range(PIECE, len(big.archive), PIECE):
            put(agent, big, start, begun["piece"])
        reply = agent.call("stage", **wanted(big))
        assert [event["bytes"] for event in reply.events] == [0]
        assert reply.result == {"sent": False, "digest": big.digest}
    assert names(work) == [big.digest]


def half(piece: Path, data: bytes) -> None:
    piece.write_bytes(data[:1000])


def longer(piece: Path, data: bytes) -> None:
    piece.write_bytes(data + b"x")


def another(piece: Path, data: bytes) -> None:
    piece.write_bytes(bytes(len(data)))


def a_link(piece: Path, data: bytes) -> None:
    (piece.parent / "real").write_bytes(data)
    piece.symlink_to("real")


def nothing(piece: Path, data: bytes) -> None:
    pass


@pytest.mark.parametrize("arrived", [half, longer, another, a_link, nothing])
def test_a_piece_that_did_not_arrive_whole_is_refused_and_what_was_there_stays(
    work: Path, big: Packed, arrived: Callable[[Path, bytes], None]
) -> None:
    with Agent(work) as agent:
        place = begin(agent, big)["piece"]
        put(agent, big, 0, place)
        arrived(Path(place), big.archive[PIECE : 2 * PIECE])
        with pytest.raises(AgentFailed):
            announce(agent, big, PIECE)
        assert not os.path.lexists(place)
        assert arriving(work, big).read_bytes() == big.archive[:PIECE]
        # the conversation goes on, with that piece
        assert put(agent, big, PIECE, place) == 2 * PIECE


def test_a_piece_may_begin_before_the_end_of_what_is_there_but_not_behind_it(work: Path, big: Packed) -> None:
    with Agent(work) as agent:
        place = begin(agent, big)["piece"]
        put(agent, big, 0, place)
        with pytest.raises(AgentFailed) as refused:
            put(agent, big, 2 * PIECE, place)
        assert (refused.value.kind, refused.value.exit) == ("archive", 4)
        # the client found that the beginning was another archive's
        assert put(agent, big, 0, place) == PIECE
        assert arriving(work, big).read_bytes() == big.archive[:PIECE]


def test_nothing_is_asked_for_where_the_disk_has_no_room(work: Path, big: Packed) -> None:
    with Agent(work) as agent, pytest.raises(AgentFailed) as refused:
        agent.call("archive_begin", digest=big.digest, size=1 << 60)
    assert (refused.value.kind, refused.value.exit) == ("disk_full", 5)
