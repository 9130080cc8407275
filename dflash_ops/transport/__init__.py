"""local, ssh and pct behind one small protocol, and the conversation with the agent on top of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dflash_ops.transport.base import Channel, Pusher, Transport
from dflash_ops.transport.conversation import Conversation

if TYPE_CHECKING:
    from dflash_ops.config import Host

__all__ = ["Channel", "Conversation", "Pusher", "Transport", "transport_for"]


def transport_for(host: Host, announce: Callable[[str], None]) -> Transport:
    """The transport that the inventory names. `announce` is told what a person must know (an accepted host key)."""
    if host.transport == "local":
        from dflash_ops.transport.local import LocalTransport

        return LocalTransport()
    if host.ssh is None:
        raise ValueError(f"{host.name}: transport {host.transport} without ssh")
    if host.transport == "ssh":
        from dflash_ops.transport.ssh import SshTransport

        return SshTransport(host.ssh, announce)
    if host.pct is None:
        raise ValueError(f"{host.name}: transport pct without pct")
    from dflash_ops.transport.pct import PctTransport

    return PctTransport(host.ssh, host.pct, announce)
