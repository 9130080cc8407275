"""A link that breaks: a TCP proxy between the client and sshd, which counts bytes and cuts, stalls or delays at one."""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
import time
from dataclasses import dataclass

CHUNK = 16 * 1024
STALLED_FOR_S = 60.0
"""A link that swallows everything is cut in the end, as a TCP connection is: nobody waits for ever."""
DELAY_S = 0.03


class Direction(enum.Enum):
    UP = "client to host"
    DOWN = "host to client"


class Harm(enum.Enum):
    CUT = "cut"
    STALL = "stall"
    DELAY = "delay"


@dataclass
class Trap:
    """Springs when `at` bytes have passed in `direction`."""

    harm: Harm
    direction: Direction
    at: int


class Connection:
    def __init__(self, link: Link, client: socket.socket, server: socket.socket) -> None:
        self._link = link
        self._sockets = {Direction.UP: (client, server), Direction.DOWN: (server, client)}
        self.harm: Harm | None = None
        self.left = False
        """Whether the client has closed its end."""
        for direction in Direction:
            threading.Thread(target=self._pump, args=(direction,), daemon=True).start()

    def _pump(self, direction: Direction) -> None:
        source, sink = self._sockets[direction]
        try:
            while data := source.recv(CHUNK):
                for part in self._link.pass_through(self, direction, data):
                    if self.harm is Harm.DELAY:
                        time.sleep(DELAY_S)
                    if self.harm is not Harm.STALL:
                        sink.sendall(part)
        except OSError:
            pass
        self.left |= direction is Direction.UP
        # a swallowed end of file never reaches the other side
        if self.harm is not Harm.STALL:
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """A reset in both directions, as when a router forgets the connection."""
        for end, _ in self._sockets.values():
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
                end.close()


class Link:
    """Use as a context manager; listens on 127.0.0.1:`port`. Connections made after the trap has sprung are whole."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self.passed = dict.fromkeys(Direction, 0)
        self._trap: Trap | None = None
        self._stalled: list[Connection] = []
        self._timer: threading.Timer | None = None
        self.given_up = False
        """Whether a stalled link had to be cut: its client had not left it."""
        self.sprung = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        if self._timer is not None:
            self._timer.cancel()
        self.mend()

    def set_trap(self, harm: Harm, direction: Direction, after: int) -> None:
        """Springs when `after` more bytes have passed."""
        with self._lock:
            self._trap = Trap(harm, direction, self.passed[direction] + after)

    def _give_up(self) -> None:
        with self._lock:
            stalled = self._stalled
        # a command that has gone on over another connection is not cut, however long it takes
        self.given_up = any(not one.left for one in stalled)
        for one in stalled:
            one.cut()

    def mend(self) -> None:
        """The connections that there are end, at last."""
        with self._lock:
            self._trap = None
            ending, self._connections = self._connections, []
        for connection in ending:
            connection.cut()

    def pass_through(self, connection: Connection, direction: Direction, data: bytes) -> list[bytes]:
        """The parts in which `data` goes on; the trap springs between two of them."""
        with self._lock:
            start = self.passed[direction]
            self.passed[direction] += len(data)
            trap = self._trap
            if trap is None or trap.direction is not direction or trap.at > start + len(data):
                return [data]
            self._trap = None
            hurt = list(self._connections)
        cut_at = max(0, trap.at - start)
        self._spring(trap.harm, hurt, connection, direction, data[:cut_at])
        return [data[cut_at:]] if trap.harm is Harm.DELAY else []

    def _spring(
        self, harm: Harm, hurt: list[Connection], connection: Connection, direction: Direction, last: bytes
    ) -> None:
        sink = connection._sockets[direction][1]
        with contextlib.suppress(OSError):
            sink.sendall(last)
        for one in hurt:
            one.harm = harm
            if harm is Harm.CUT:
                one.cut()
        if harm is Harm.STALL:
            self._stalled = hurt
            self._timer = threading.Timer(STALLED_FOR_S, self._give_up)
            self._timer.daemon = True
            self._timer.start()
        self.sprung.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections.append(Connection(self, client, server))
