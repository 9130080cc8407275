"""How much may be under way towards us: a channel's receive window, from the round trip that was measured.

What a link brings is at most one window a round trip: 2 MiB (paramiko's default) are 25 MiB/s at 80 ms, and more than
enough on a short link.
"""

from __future__ import annotations

import threading
import time
from typing import Any

LEAST_BYTES = 2 << 20
MOST_BYTES = 16 << 20
RATE = 200 << 20
"""Bytes a second that a link is to bring at most."""


def window_for(rtt_s: float) -> int:
    """Bytes for a link with this round trip."""
    return int(min(max(rtt_s * RATE, LEAST_BYTES), MOST_BYTES))


class Windows:
    """Of the channels of one connection. `opened` is told of each, and how long its opening took: one round trip."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._rtt_s: float | None = None
        self._waiting: list[Any] | None = None

    def opened(self, channel: Any, took_s: float) -> None:
        """Widens the window, at once or as soon as a second measurement says so too; nobody waits for that."""
        with self._lock:
            self._rtt_s = took_s if self._rtt_s is None else min(took_s, self._rtt_s)
            if window_for(self._rtt_s) <= LEAST_BYTES:
                return
            if self._waiting is None:
                # the first one may have waited for a busy sshd
                self._waiting = [channel]
                threading.Thread(target=self._measure_again, name="ssh-rtt", daemon=True).start()
                return
        self._widen(channel)

    def _measure_again(self) -> None:
        started = time.monotonic()
        try:
            # any answer will do: OpenSSH refuses what it does not know
            self._transport.global_request("keepalive@openssh.com", wait=True)
            with self._lock:
                self._rtt_s = min(self._rtt_s or 0.0, time.monotonic() - started)
                waiting = self._waiting or []
            for channel in waiting:
                self._widen(channel)
        except (OSError, EOFError):
            # the link is cut: whoever reads or writes tells
            return

    def _widen(self, channel: Any) -> None:
        from paramiko.common import cMSG_CHANNEL_WINDOW_ADJUST
        from paramiko.message import Message

        window = window_for(self._rtt_s or 0.0)
        more = window - channel.in_window_size
        if more <= 0 or channel.closed:
            return
        message = Message()
        message.add_byte(cMSG_CHANNEL_WINDOW_ADJUST)
        message.add_int(channel.remote_chanid)
        message.add_int(more)
        self._transport._send_user_message(message)
        channel._set_window(window, channel.in_max_packet_size)


def start(channel: Any, command: str) -> None:
    """As `channel.exec_command`, without waiting a round trip for the answer: a refusal closes the channel."""
    from paramiko.common import cMSG_CHANNEL_REQUEST
    from paramiko.message import Message

    message = Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exec")
    message.add_boolean(True)
    message.add_string(command)
    channel.transport._send_user_message(message)
