"""A long link: a TCP proxy on 127.0.0.1, in a process of its own, that brings every byte half a round trip late.

    python delay.py TARGET_PORT RTT_MS        prints the port where it listens

What it delays is bytes, not TCP's handshake. It has no limit of its own to what is under way. Stopped (SIGSTOP) it is a
link that swallows everything and tells nobody.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

BLOCK = 256 * 1024


@dataclass(frozen=True)
class Link:
    port: int
    process: subprocess.Popen[str]

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)


@contextlib.contextmanager
def delayed(target_port: int, rtt_ms: float) -> Iterator[Link]:
    """A link to 127.0.0.1:`target_port`, for as long as the block runs."""
    argv = [sys.executable, "-I", __file__, str(target_port), str(rtt_ms)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Link(int(process.stdout.readline()), process)
    finally:
        process.kill()
        process.communicate()


def _carry(source: socket.socket, sink: socket.socket, delay_s: float) -> None:
    under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def arrive() -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = under_way.get()
                if (left := due - time.monotonic()) > 0:
                    time.sleep(left)
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)

    threading.Thread(target=arrive, daemon=True).start()
    data = b"-"
    while data:
        try:
            data = source.recv(BLOCK)
        except OSError:
            data = b""
        under_way.put((time.monotonic() + delay_s, data))


def _main(target_port: int, rtt_ms: float) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=50)
    print(listener.getsockname()[1], flush=True)
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", target_port))
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=_carry, args=(source, sink, rtt_ms / 2000), daemon=True).start()


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]))
