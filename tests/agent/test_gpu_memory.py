"""A stop shows that the memory of the GPUs is free again. nvidia-smi is a stand-in: it prints what it is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import Agent, Packed, eventually, job

MIB = 1 << 20


class Gpus:
    """Two GPUs: what of their memory is in use, and how often that was asked."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._text, self._asked = folder / "text", folder / "asked"
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho >>{self._asked}\ncat {self._text}\n")
        program.chmod(0o755)

    def use(self, *mebibytes: int) -> None:
        part = self.folder / "part"
        names = ("GPU-aaaa", "GPU-bbbb")
        part.write_text(
            "".join(f"{n}, {names[n]}, NVIDIA H200, 143771, {used}, 570.86.15\n" for n, used in enumerate(mebibytes))
        )
        part.replace(self._text)

    @property
    def asked(self) -> int:
        return len(self._asked.read_bytes())


@pytest.fixture
def gpus(tmp_path: Path) -> Gpus:
    made = Gpus(tmp_path / "bin")
    made.use(10, 300)
    return made


@pytest.fixture
def host(gpus: Gpus, work: Path, release: Packed) -> Iterator[Agent]:
    """A run on GPU 1 of two."""
    environment = {**os.environ, "PATH": f"{gpus.folder}:{os.environ['PATH']}"}
    with Agent(work, environment=environment) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        arguments = job(release, forever=True)
        arguments["settings"]["workload"] = {"gpus": [1]}
        agent.call("launch", run="one", reason="test", **arguments)
        eventually(lambda: "ready" in agent.call("follow", run="one").log)
        yield agent


def of_one_gpu(reply: Any) -> dict[str, Any]:
    (only,) = reply.result["gpu_memory"]
    assert reply.events[-1]["phase"] == "verified"
    assert reply.events[-1]["gpu_memory"] == [only]
    assert only["what"] in reply.events[-1]["what"]
    assert (only["uuid"], only["before_bytes"]) == ("GPU-bbbb", 300 * MIB)
    return dict(only)


def test_memory_that_comes_back_is_waited_for(gpus: Gpus, host: Agent) -> None:
    gpus.use(9000, 9000)
    before = gpus.asked
    number = host.ask("stop", run="one", grace_s=60)
    eventually(lambda: gpus.asked > before + 1)
    gpus.use(9000, 301)
    found = of_one_gpu(host.reply(number))
    assert (found["freed"], found["used_bytes"]) == (True, 301 * MIB)
    assert found["what"] == "GPU-bbbb: 301 MiB in use, 300 MiB before the launch"


def test_memory_that_stays_is_told_with_whose_it_may_be(gpus: Gpus, host: Agent) -> None:
    gpus.use(10, 9000)
    reply = host.call("stop", run="one", grace_s=60)
    assert (reply.result["state"], reply.result["remaining"]) == ("STOPPED", [])
    found = of_one_gpu(reply)
    assert (found["freed"], found["used_bytes"]) == (False, 9000 * MIB)
    assert "another program began meanwhile" in found["what"]
    assert "inside a container it cannot" in found["what"]


def test_what_nvidia_smi_does_not_say_is_not_claimed(gpus: Gpus, host: Agent) -> None:
    gpus.use(10)
    found = of_one_gpu(host.call("stop", run="one", grace_s=60))
    assert (found["freed"], found["used_bytes"]) == (None, None)
    assert "not checked" in found["what"]


def test_a_run_without_gpus_claims_nothing(agent: Agent, staged: Packed) -> None:
    agent.call("launch", run="one", reason="test", **job(staged, forever=True))
    eventually(lambda: "ready" in agent.call("follow", run="one").log)
    assert agent.call("stop", run="one", grace_s=60).result["gpu_memory"] is None
