"""Runs `dflash-ops` as a person does: a process, a home of its own, an inventory and a playbook of a few lines.

A command that is waited for is a process forked from one that has imported everything (`typist_process.py`), one that
is watched while it runs is started anew, as everything is for a person.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.typist import Typist

TINY = Path(__file__).parent / "tiny_trainer"
FAULTS = TINY / "faults"
PATIENCE_S = 240.0
"""A bound for what hangs; nothing is judged by time."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[Json]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def result(self) -> Json:
        last = self.events[-1]
        assert last["event"] == "result"
        return last

    def named(self, name: str) -> list[Json]:
        return [event for event in self.events if event["event"] == name]

    @property
    def error(self) -> Json:
        (only,) = self.named("error")
        return only

    @property
    def log(self) -> list[str]:
        return [event["line"] for event in self.named("log") if event["source"] == "run"]


@dataclass(frozen=True)
class Running:
    """A command that is still running. Its output is read here alone: `Popen.communicate` would lose what a reader
    before it has buffered."""

    process: subprocess.Popen[str]
    errors: IO[bytes]
    heard: list[Json] = field(default_factory=list)
    """All events that were read so far."""

    def until_event(self, name: str) -> Json:
        """Reads events up to the first of that name."""
        for event in self._events():
            if event["event"] == name:
                return event
        raise AssertionError(f"ended without {name}: {self._said()}{self.heard[-3:]}")

    def rest(self) -> list[Json]:
        """All events from here to the end; `code` is known then."""
        events = list(self._events())
        self.process.wait()
        return events

    @property
    def code(self) -> int:
        return self.process.wait()

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def _events(self) -> Iterator[Json]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self.heard.append(json.loads(line))
            yield self.heard[-1]

    def _said(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")


@dataclass
class Desk:
    """A workstation: a folder with `hosts/` and `playbooks/`, in which commands are typed."""

    folder: Path
    host: str = "box"
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def write_host(self, name: str, text: str) -> None:
        path = self.folder / "hosts" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def write_playbook(
        self,
        name: str = "tiny",
        *,
        faults: tuple[str, ...] = (),
        workload: Mapping[str, object] | None = None,
        training: Mapping[str, object] | None = None,
        run: Mapping[str, object] | None = None,
    ) -> None:
        """The tiny trainer: two drafter threads, milliseconds a step. `faults` are patches of tests/tiny_trainer."""
        playbook = {
            "version": 1,
            "name": name,
            "trainer": {
                "source": str(TINY),
                "module": "tiny_trainer",
                "patches": [str(FAULTS / f"{fault}.patch") for fault in faults],
            },
            "workload": {
                "target": "package:tiny_trainer/target.json",
                "require_cuda": False,
                "drafter_threads": 2,
                "block_size": 4,
                "anchors": 4,
                "buckets": [32],
                "mask_token": "<mask>",
                "canary_timeout_s": 120,
                **(workload or {}),
            },
            "training": {
                "steps": 12,
                "learning_rate": 0.05,
                "prompts": "package:tiny_trainer/prompts.jsonl",
                "answer_tokens": 12,
                "evaluation_prompts": 4,
                "evaluation_tokens": 12,
                "checkpoint_every": 4,
                **(training or {}),
            },
            "run": {"grace_s": 60, **(run or {})},
        }
        path = self.folder / "playbooks" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(playbook))  # JSON is YAML

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "dflash_ops", *words]

    def env(self) -> dict[str, str]:
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DFLASH_OPS", "XDG_"))}
        return {**kept, "HOME": str(home), "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", **self.environment}

    def type(self, *words: str) -> Ended:
        """A command, to its end, for people."""
        with tempfile.TemporaryDirectory() as output:
            command = _typist().type(
                list(words), cwd=self.folder, environment=self.env(), output=Path(output), beat=None
            )
            return command.ended

    def run(self, command: str, *words: str, host: bool = True) -> Ended:
        """A command with `--json`, on this desk's host."""
        return self.type(command, *words, "--json", *(["--host", self.host] if host else []))

    def deploy(self, *words: str, playbook: str = "tiny") -> Ended:
        return self.run("deploy", "--playbook", playbook, *words)

    @contextmanager
    def started(self, command: str, *words: str) -> Iterator[Running]:
        """A command with `--json` that is still running; killed at the block's end."""
        with tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                self.argv(command, *words, "--json", "--host", self.host),
                cwd=self.folder,
                env=self.env(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                # tests in the background inherit an ignored SIGINT; a person at a terminal does not
                preexec_fn=listen_to_interrupts,  # noqa: PLW1509 -- no threads here
            )
            watchdog = threading.Timer(PATIENCE_S, process.kill)
            watchdog.start()
            try:
                yield Running(process, err)
            finally:
                watchdog.cancel()
                process.kill()
                process.communicate()


@functools.cache
def _typist() -> Typist:
    """A process that has imported everything: half of what most commands cost is that."""
    from tests.typist import Typist

    typist = Typist()
    atexit.register(typist.close)
    return typist


def listen_to_interrupts() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def eventually(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < deadline, "did not come to pass"
        time.sleep(0.05)


def local_desk(folder: Path) -> Desk:
    """A desk whose only host is this machine, with a work directory of its own."""
    desk = Desk(folder)
    desk.write_host("box", f"transport: local\nworkdir: {folder / 'work'}\npython: {sys.executable}\n")
    desk.write_playbook()
    return desk
