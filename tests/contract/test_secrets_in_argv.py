"""A secret is in no argument of a process, which every user of a machine can read, and in no environment but the
trainer's: here, on a node, in a container."""

from __future__ import annotations

import json
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.commands import Desk
from tests.typist import wait_until

SECRET = "hf_in-no-argument-0123456789"
PLANTED = "hf_seen-in-an-argument-987654"
TELLING = """--- a/tiny_trainer/__main__.py
+++ b/tiny_trainer/__main__.py
@@ -21,2 +21,3 @@
 from .stacks import print_on_signal
+print(f"the token is {__import__('os').environ['TOKEN']}", flush=True)
 from .stopping import stopped_by_term
"""


PAUSE_S = 0.02


class Watch:
    """Looks at every process, containers' too: over and over, and, as root, at each `exec` that the kernel tells of.

    A program that ends, or becomes another, within a millisecond is seen at its `exec` two times out of three, and
    without root hardly ever: so every way is tried, with two deploys.
    """

    def __init__(self, *texts: str) -> None:
        self._texts = {text.encode(): text for text in texts}
        self._over = threading.Event()
        self.in_arguments: set[str] = set()
        self.in_environments: set[str] = set()
        """Command lines of those who have one of the texts there."""
        self._threads = [threading.Thread(target=self._look_over_and_over, daemon=True)]
        with suppress(OSError):
            events = _told_of_processes()
            self._threads.append(threading.Thread(target=self._look_when_told, args=(events,), daemon=True))
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _look_over_and_over(self) -> None:
        while not self._over.is_set():
            for folder in Path("/proc").glob("[0-9]*"):
                self._look(folder)
            # Python runs one thread at a time, and what the kernel tells of must be looked at there and then
            self._over.wait(PAUSE_S)

    def _look_when_told(self, events: socket.socket) -> None:
        with events:
            while not self._over.is_set():
                if not select.select([events], [], [], 0.1)[0]:
                    continue
                with suppress(OSError):  # more came than was read
                    what, _, _, _, pid = PROCESS_EVENT.unpack_from(events.recv(4096), CONNECTOR.size)
                    if what == EXEC:
                        self._look_at_arguments(f"/proc/{pid}")

    def _look_at_arguments(self, folder: str) -> bytes:
        try:
            with open(f"{folder}/cmdline", "rb", buffering=0) as file:
                argv = file.read()
        except OSError:
            return b""
        self.in_arguments |= {text for raw, text in self._texts.items() if raw in argv}
        return argv

    def _look(self, folder: Path) -> None:
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            environment = b""
        # after the environment: one that had it from an `exec` has that one's arguments by now, or has ended, and none
        argv = self._look_at_arguments(str(folder))
        if argv and any(raw in environment for raw in self._texts):
            self.in_environments.add(argv.replace(b"\0", b" ").decode(errors="replace"))


CONNECTOR = struct.Struct("=IHHII IIIIHH")
"""`struct nlmsghdr` and `struct cn_msg` (linux/netlink.h, linux/connector.h)."""
PROCESS_EVENT = struct.Struct("=IIQ II")
"""The head of `struct proc_event` and of its `exec` (linux/cn_proc.h): what, cpu, time, thread, process."""
NETLINK_CONNECTOR, PROCESSES, DONE, LISTEN, EXEC = 11, 1, 3, 1, 2


def _told_of_processes() -> socket.socket:
    """Raises OSError for whom is not root."""
    events = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_CONNECTOR)
    try:
        events.bind((0, PROCESSES))
        ask = struct.pack("=I", LISTEN)
        events.send(
            CONNECTOR.pack(CONNECTOR.size + len(ask), DONE, 0, 0, 0, PROCESSES, PROCESSES, 0, 0, len(ask), 0) + ask
        )
    except OSError:
        events.close()
        raise
    return events


@contextmanager
def watched(*texts: str) -> Iterator[Watch]:
    watch = Watch(*texts)
    try:
        yield watch
    finally:
        watch.end()


@pytest.fixture
def telling(desk: Desk) -> Desk:
    """The trainer says in every verb what it was given."""
    desk.write_playbook()
    patch = desk.folder / "telling.patch"
    patch.write_text(TELLING)
    path = desk.folder / "playbooks" / "tiny.yaml"
    playbook = json.loads(path.read_text())
    playbook["trainer"]["patches"] = [str(patch)]
    path.write_text(json.dumps(playbook))
    host = desk.folder / "hosts" / "box.yaml"
    host.write_text(f"{host.read_text()}secrets: {{TOKEN: file:token}}\n")
    (desk.folder / "hosts" / "token").write_text(f"{SECRET}\n")
    return desk


def test_no_process_has_a_secret_in_its_arguments(telling: Desk) -> None:
    with watched(SECRET) as watch:
        done = telling.deploy()
        again = telling.deploy()
    assert done.code == again.code == 0, done.out + done.err
    assert "the token is ***" in done.log
    assert watch.in_arguments == set()
    # the trainer has it, seen while it ran, and neither agent, supervisor nor client
    assert watch.in_environments
    assert [each for each in watch.in_environments if " tiny_trainer " not in each] == []


def test_the_watch_sees_what_is_gone_in_a_moment() -> None:
    with watched(PLANTED) as watch:

        def seen() -> bool:
            subprocess.run(["env", f"TOKEN={PLANTED}", "true"], check=True)
            return watch.in_arguments == {PLANTED} and watch.in_environments != set()

        wait_until(seen, "an argument, and an environment")
