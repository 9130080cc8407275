"""The person at the desk, who types commands of dflash-ops: see `typist_process.py`."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.commands import Ended, Json

ROOT = Path(__file__).parents[1]
PATIENCE_S = 240.0
LOOK_S = 0.01


class Stuck(AssertionError):
    """Something that must end did not."""


def wait_until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        if time.monotonic() > deadline:
            raise Stuck(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(LOOK_S)


@dataclass
class Command:
    """A command that was typed. Its output goes to files, which are read here while it runs."""

    words: list[str]
    out: Path
    err: Path
    begun: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    pid: int = 0
    code: int = 0
    _events: list[Json] = field(default_factory=list)
    _read: int = 0

    @property
    def events(self) -> list[Json]:
        """What it has said so far; a line that is not whole has not been said."""
        with self.out.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        self._events += [json.loads(line) for line in whole.splitlines()]
        return self._events

    def has_said(self, name: str) -> bool:
        return any(event["event"] == name for event in self.events)

    @property
    def ended(self) -> Ended:
        self.wait()
        return Ended(self.code, self.out.read_text(), self.err.read_text())

    def wait(self) -> None:
        if not self.over.wait(PATIENCE_S):
            raise Stuck(f"{' '.join(self.words)} did not end within {PATIENCE_S:g} s: {self.events[-3:]}")

    def kill(self) -> bool:
        """SIGKILL; False when it had ended already."""
        if self.over.is_set():
            return False
        os.kill(self.pid, signal.SIGKILL)
        self.over.wait()
        return self.code == -signal.SIGKILL


class Typist:
    """Use as a context manager. `package` is the folder that holds `dflash_ops`; `clock`: the file through which its
    agents read the time."""

    def __init__(self, package: Path = ROOT, *, clock: str | None = None) -> None:
        path = os.pathsep.join(dict.fromkeys((str(package), str(ROOT))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.typist_process", *([clock] if clock else [])],
            cwd=ROOT if package == ROOT else package,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._commands: dict[int, Command] = {}
        self._numbers = itertools.count(1)
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Typist:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)

    def type(
        self, words: list[str], *, cwd: Path, environment: dict[str, str], output: Path, beat: float | None
    ) -> Command:
        """`output` is a folder for what it prints."""
        number = next(self._numbers)
        name = output / f"{len(list(output.iterdir())) // 2:02d}-{words[0]}"
        command = Command(words, name.with_suffix(".out"), name.with_suffix(".err"))
        command.out.touch()
        command.err.touch()
        self._commands[number] = command
        order: dict[str, Any] = {
            "id": number,
            "words": words,
            "cwd": str(cwd),
            "environment": environment,
            "out": str(command.out),
            "err": str(command.err),
            "beat": beat,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        command.begun.wait(PATIENCE_S)
        return command

    def _listen(self) -> None:
        for message in self._messages():
            command = self._commands[message["id"]]
            if "pid" in message:
                command.pid = message["pid"]
                command.begun.set()
            else:
                command.code = message["code"]
                command.over.set()

    def _messages(self) -> Iterator[Json]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json.loads(line)
