"""A secret is in no argument of a process, which every user of a machine can read: here, on a node, in a container."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


class Watch(threading.Thread):
    """Reads the arguments of every process over and over, containers' too. What lives for less than one round of some
    milliseconds it can miss.
    """

    def __init__(self, *texts: str) -> None:
        super().__init__(daemon=True)
        self._texts = {text.encode(): text for text in texts}
        self._over = threading.Event()
        self._rounds = 0
        self.found: set[str] = set()

    def run(self) -> None:
        while not self._over.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    argv = path.read_bytes()
                except OSError:
                    continue
                self.found |= {text for raw, text in self._texts.items() if raw in argv}
            self._rounds += 1

    def another_round(self) -> None:
        """Returns when one that begins now has ended."""
        wanted = self._rounds + 2
        wait_until(lambda: self._rounds >= wanted, "every process is looked at")

    def end(self) -> None:
        self._over.set()
        self.join()


@contextmanager
def watched(*texts: str) -> Iterator[Watch]:
    watch = Watch(*texts)
    watch.start()
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
    with watched(SECRET, PLANTED) as watch:
        done = telling.deploy()
        again = telling.deploy()
        with subprocess.Popen(["sh", "-c", "read line", "planted", PLANTED], stdin=subprocess.PIPE) as seen:
            watch.another_round()
            seen.communicate(b"\n")
    assert done.code == again.code == 0, done.out + done.err
    assert "the token is ***" in done.log
    assert watch.found == {PLANTED}
