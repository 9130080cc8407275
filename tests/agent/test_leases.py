"""A device belongs to one owner at a time, whoever asks when; what nobody of ours leases is judged by its memory."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import PATIENCE_S, Agent, AgentFailed, Packed, eventually, job

UUIDS = ("GPU-aaaa", "GPU-bbbb")
MIB_OF_GPU = 143771


class GpuHost:
    """A host whose nvidia-smi says what we want: no machine of ours has GPUs in such numbers and states."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.work, self._folder = work, folder / "bin"
        self._folder.mkdir()
        program = self._folder / "nvidia-smi"
        script = f'case "$1" in *compute-apps*) cat {self._folder}/apps;; *) cat {self._folder}/gpus;; esac'
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        self.say()

    def say(self, used: tuple[int, int] = (10, 10), apps: str = "") -> None:
        lines = [f"{i}, {UUIDS[i]}, NVIDIA H200, {MIB_OF_GPU}, {used[i]}, 570.86.15\n" for i in (0, 1)]
        for name, text in (("apps", apps), ("gpus", "".join(lines))):
            part = self._folder / f"{name}.tmp"
            part.write_text(text)
            part.rename(self._folder / name)

    def agent(self, **options: Any) -> Agent:
        environment = {**os.environ, "PATH": f"{self._folder}:{os.environ['PATH']}"}
        return Agent(self.work, environment=environment, **options)


@pytest.fixture
def host(tmp_path: Path, work: Path, release: Packed) -> GpuHost:
    made = GpuHost(tmp_path, work)
    with made.agent() as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
    return made


def on(gpus: list[int], release: Packed, **act: Any) -> dict[str, Any]:
    arguments = job(release, **act)
    arguments["settings"]["workload"] = {"gpus": gpus}
    return arguments


def answers(*asked: tuple[Agent, int]) -> queue.Queue[tuple[Agent, AgentFailed | None]]:
    """Each agent's answer as it comes: None for a result."""
    found: queue.Queue[tuple[Agent, AgentFailed | None]] = queue.Queue()

    def wait(agent: Agent, number: int) -> None:
        try:
            agent.reply(number)
        except AgentFailed as failed:
            found.put((agent, failed))
        except AssertionError:  # the conversation was closed
            return
        else:
            found.put((agent, None))

    for one in asked:
        threading.Thread(target=wait, args=one, daemon=True).start()
    return found


def test_two_launches_at_once_never_both_win(host: GpuHost, release: Packed) -> None:
    with host.agent() as first, host.agent() as second:
        for round_, gpus in enumerate(([0], [0, 1], [1])):
            names = {first: f"first-{round_}", second: f"second-{round_}"}
            asked = [
                (agent, agent.ask("launch", run=name, reason="test", **on(gpus, release, forever=True)))
                for agent, name in names.items()
            ]
            found = answers(*asked)
            both = [found.get(timeout=PATIENCE_S) for _ in asked]
            (won,) = [agent for agent, failed in both if failed is None]
            (lost,) = [failed for _, failed in both if failed is not None]
            assert (lost.kind, lost.exit) == ("busy", 8)
            assert names[won] in lost.what
            assert UUIDS[gpus[0]] in lost.what
            leases = first.call("holders").result["leases"]
            assert [(lease["owner"], lease["devices"]) for lease in leases] == [
                (names[won], sorted(UUIDS[gpu] for gpu in gpus))
            ]
            eventually(lambda won=won, name=names[won]: "ready" in won.call("follow", run=name).log)
            assert won.call("stop", run=names[won], grace_s=60).result["state"] == "STOPPED"
            assert first.call("holders").result["leases"] == []


def test_two_canaries_at_once_never_both_win(host: GpuHost, release: Packed) -> None:
    first, second = host.agent(), host.agent()
    asked = [(agent, agent.ask("canary", timeout_s=600, **on([0], release, hang=True))) for agent in (first, second)]
    found = answers(*asked)
    lost, failed = found.get(timeout=PATIENCE_S)
    assert failed is not None
    assert failed.kind == "busy"
    assert "canary " in failed.what
    assert found.empty()
    # the other GPU is free all the same, and the loser's verdicts and folders are as they were
    assert lost.call("canary", **on([1], release, evidence="pass")).result["verdict"]["outcome"] == "pass"
    with pytest.raises(AgentFailed) as caught:
        lost.call("launch", run="late", reason="test", **on([0], release))
    assert caught.value.kind == "busy"
    for agent in (first, second):
        agent.process.kill()
        agent.process.wait()
    # a dead agent's lease is void
    with host.agent() as third:
        assert third.call("free", **on([0], release)).result["devices"] == ["GPU-aaaa"]
        # and what it left behind is ended by the next holder of the lock
        third.call("lock", owner="ann@desk", command="deploy")
        assert not list((host.work / "canary").glob("*/running.json"))


def test_a_lease_ends_with_its_last_process(host: GpuHost, work: Path, release: Packed) -> None:
    with host.agent() as agent:
        agent.call("launch", run="one", reason="test", **on([0], release))
        assert agent.call("follow", run="one", wait=True).result["state"] == "SUCCEEDED"
        assert agent.call("free", **on([0], release)).result["devices"] == ["GPU-aaaa"]
        marks = {"DFLASH_OPS_RUN": "one", "DFLASH_OPS_WORKDIR": str(work)}
        left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, **marks})
        try:
            with pytest.raises(AgentFailed) as caught:
                agent.call("free", **on([0], release))
            assert f"run one has ended SUCCEEDED, but its processes [{left.pid}] live" in caught.value.what
            assert agent.call("free", **on([1], release)).result["devices"] == ["GPU-bbbb"]
        finally:
            left.kill()
            left.wait()
        assert agent.call("free", **on([0], release)).result["devices"] == ["GPU-aaaa"]


def test_a_damaged_record_of_a_living_run_holds_every_device(host: GpuHost, work: Path, release: Packed) -> None:
    with host.agent() as agent:
        agent.call("launch", run="one", reason="test", **on([0], release, forever=True))
        eventually(lambda: "ready" in agent.call("follow", run="one").log)
        (work / "runs/one/run.json").write_text("{")
        with pytest.raises(AgentFailed) as caught:
            agent.call("free", **on([1], release))
        assert "run one is running on GPU-bbbb" in caught.value.what
        agent.call("stop", run="one", grace_s=60)


def test_a_gpu_in_use_by_somebody_else_is_refused_unless_a_reason_is_given(
    host: GpuHost, work: Path, release: Packed
) -> None:
    host.say(used=(70_000, 10), apps="GPU-aaaa, 4242, /usr/bin/python3, 69990 MiB\n")
    with host.agent() as one, host.agent() as two, host.agent() as three:
        found = answers(
            (one, one.ask("free", **on([0, 1], release))),
            (two, two.ask("canary", **on([0], release, evidence="pass"))),
            (three, three.ask("launch", run="never", reason="test", **on([0], release))),
        )
        for _ in range(3):
            _, failed = found.get(timeout=PATIENCE_S)
            assert failed is not None
            assert (failed.kind, failed.exit) == ("busy", 8)
            assert "GPU 0 (GPU-aaaa) is in use" in failed.what
            assert "68.4 of 140.4 GiB; pid 4242 /usr/bin/python3 (69990 MiB)" in failed.what
            assert "shared_gpus" in failed.error["fix"]
        assert one.call("free", **on([1], release)).result["devices"] == ["GPU-bbbb"]
        (seen,) = one.call("holders").result["occupied"]
        assert (seen["uuid"], seen["index"]) == ("GPU-aaaa", 0)
        assert one.call("runs").result["runs"] == []
        shared = {**on([0], release, evidence="pass"), "shared_gpus": "vLLM lives here"}
        assert one.call("canary", **shared).result["verdict"]["outcome"] == "pass"
    started = [json.loads(line) for line in (work / "events.ndjson").read_text().splitlines()][-2]
    assert (started["event"], started["shared_gpus"], started["devices"]) == (
        "canary_start",
        "vLLM lives here",
        ["GPU-aaaa"],
    )


def test_memory_that_is_given_back_within_moments_is_waited_for(host: GpuHost, release: Packed) -> None:
    host.say(used=(70_000, 10))
    with host.agent() as agent:
        number = agent.ask("free", **on([0], release))
        host.say()
        assert agent.reply(number).result["devices"] == ["GPU-aaaa"]


def test_the_memory_of_our_own_run_is_no_news(host: GpuHost, release: Packed) -> None:
    with host.agent() as agent:
        agent.call("launch", run="one", reason="test", **on([0], release, forever=True))
        host.say(used=(70_000, 10))
        assert agent.call("holders").result["occupied"] == []
        with pytest.raises(AgentFailed) as caught:
            agent.call("free", **on([0], release))
        assert "run one is running on GPU-aaaa" in caught.value.what
        eventually(lambda: "ready" in agent.call("follow", run="one").log)
        host.say()
        agent.call("stop", run="one", grace_s=60)


def test_a_run_of_another_work_directory_is_named(host: GpuHost, tmp_path: Path, release: Packed) -> None:
    marks = {
        "DFLASH_OPS_RUN": "theirs",
        "DFLASH_OPS_WORKDIR": str(tmp_path / "other"),
        "CUDA_VISIBLE_DEVICES": "GPU-bbbb",
    }
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, **marks})
    try:
        host.say(used=(10, 70_000))
        with host.agent() as agent:
            with pytest.raises(AgentFailed) as caught:
                agent.call("free", **on([1], release))
            assert f"run theirs of the work directory {tmp_path}/other" in caught.value.what
    finally:
        other.kill()
        other.wait()
