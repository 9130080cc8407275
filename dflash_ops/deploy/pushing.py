"""A release's archive on its way beside the conversation: in pieces, so that a link that breaks costs one of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from dflash_ops.release import Release
from dflash_ops.transport import Conversation

PIECE_BYTES = 4 << 20
"""A push costs a second on its own; what a broken link has brought of a piece is lost."""


def push(conversation: Conversation, release: Release, deliver: Callable[[bytes, str], None]) -> int:
    """The bytes that were pushed now: all that the host had not verified before. `deliver` puts bytes at a path there.

    Raises OpsError where a piece did not arrive whole, TransportError where the link broke.
    """
    archive, named = release.archive, {"digest": release.digest}
    begun = conversation.request("archive_begin", {**named, "size": len(archive)})
    there, place = int(begun["from"]), str(begun["piece"])
    first = there if _sha256(archive[:there]) == begun["sha256"] else 0
    for start in range(first, len(archive), PIECE_BYTES):
        piece = archive[start : start + PIECE_BYTES]
        deliver(piece, place)
        told = {"from": start, "size": len(piece), "sha256": _sha256(piece)}
        conversation.request("archive_piece", {**named, **told})
        conversation.moved = True
    return len(archive) - first


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
