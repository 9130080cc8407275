"""Calls a trainer as dflash-ops does: by its contract, from a release's root, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
PATIENCE_S = 300.0
"""A bound for broken trainers only; nothing is judged by time."""


@dataclass(frozen=True)
class Ended:
    """How a call ended and what it left."""

    code: int
    log: str
    errors: str
    out: Path

    def read(self, name: str) -> Json:
        """Return one of the call's JSON files."""
        return json.loads((self.out / name).read_text())

    def records(self) -> list[Json]:
        """Return the records of `metrics.ndjson`."""
        return [json.loads(line) for line in (self.out / "metrics.ndjson").read_text().splitlines()]


@dataclass(frozen=True)
class Trainer:
    """A trainer under test. `settings(workload=…, training=…)` gives a settings file's content."""

    module: str
    python: str
    root: Path
    work: Path
    settings: Callable[..., Json]

    def command(self, verb: str, settings: Json, name: str, *more: str) -> tuple[list[str], Path]:
        """Return the call of a verb, with an empty output folder of that name (kept when it resumes)."""
        out = self.work / name
        out.mkdir(parents=True, exist_ok=True)
        file = self.work / f"{name}.settings.json"
        file.write_text(json.dumps(settings))
        call = [self.python, "-m", self.module, verb, "--settings", str(file), "--out", str(out), *more]
        return call, out

    def environment(self) -> dict[str, str]:
        """Return the environment of the contract, on a machine with no CUDA."""
        return {
            **os.environ,
            "PYTHONPATH": str(self.root),
            # a cache outside the release would also do, but each would hold all of torch again
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }

    def call(self, verb: str, settings: Json, name: str, *more: str) -> Ended:
        """Run a verb to its end."""
        command, out = self.command(verb, settings, name, *more)
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            timeout=PATIENCE_S,
        )
        return Ended(done.returncode, done.stdout, done.stderr, out)

    @contextmanager
    def started(self, verb: str, settings: Json, name: str) -> Iterator[Living]:
        """Start a verb; it is killed when the block ends, if it still lives."""
        command, out = self.command(verb, settings, name)
        errors = self.work / f"{name}.stderr"
        with errors.open("wb") as sink:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=sink,
            )
        try:
            yield Living(process, out, errors)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@dataclass(frozen=True)
class Living:
    """A verb that is still running."""

    process: subprocess.Popen[bytes]
    out: Path
    errors: Path

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait until something is true; fails when the process ends first."""
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def steps(self) -> int:
        """Return how many steps the metrics tell of."""
        path = self.out / "metrics.ndjson"
        return path.read_text().count('"kind": "step"') if path.exists() else 0

    def threads(self) -> int:
        """Return how many threads the process has."""
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> Ended:
        """Wait for the end."""
        code = self.process.wait(timeout=PATIENCE_S)
        return Ended(code, "", self.errors.read_text(), self.out)


def files_below(folder: Path) -> dict[str, bytes]:
    """Return every file's content by relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
