"""The host tells somebody what becomes of a run: a real command, a real web server, and nothing that waits for them."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import Agent, AgentFailed, Packed, alive, eventually, job

SECRET = "s3cr3t-t0ken-of-the-webhook"
STEP = '{"kind": "step", "step": 7, "loss": 1.5}\n'


class Web(http.server.ThreadingHTTPServer):
    """Answers as it is told, then 200; keeps what was posted."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Posted)
        self.answers: list[int] = []
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hooks/{SECRET}"

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.bodies]


class Posted(http.server.BaseHTTPRequestHandler):
    server: Web

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        code = self.server.answers.pop(0) if self.server.answers else 200
        if code == 200 and self.path == f"/hooks/{SECRET}" and self.headers["Content-Type"] == "application/json":
            self.server.bodies.append(body)
        self.send_response(code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def launch(
    agent: Agent, release: Packed, notify: dict[str, Any], policy: dict[str, Any] | None = None, **act: Any
) -> None:
    agent.call("launch", run="one", reason="test", policy=policy or {}, notify=notify, **job(release, **act))


def ended(agent: Agent) -> str:
    return str(agent.call("follow", run="one", wait=True).result["state"])


def supervisor_of(work: Path) -> int:
    return int(json.loads((work / "runs/one/state.json").read_text())["supervisor"]["pid"])


@pytest.mark.parametrize("small_disk", ["20m"], indirect=True)
def test_a_disk_that_is_nearly_full_is_told_once(small_disk: Path, release: Packed, web: Web) -> None:
    work = small_disk
    with Agent(work) as agent:
        agent.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
        launch(agent, release, {"webhook": web.url}, {"keep_last": None}, forever=True)
        eventually(lambda: "ready" in agent.call("follow", run="one").log)
        checkpoints = work / "runs/one/out/checkpoints"
        save(checkpoints, 1, 4 << 20)
        # room for three more: nothing is said
        save(checkpoints, 2, 4 << 20)
        assert agent.call("status", run="one").result["disk_low"] is None
        save(checkpoints, 3, 4 << 20)
        eventually(lambda: web.bodies)
        told = web.events[0]
        assert (told["event"], told["run"], told["state"]) == ("disk_low", "one", "RUNNING")
        assert "and a checkpoint takes 4.0 MiB: there is room for one" in told["reason"]
        eventually(lambda: agent.call("status", run="one").result["disk_low"])
        assert agent.call("status", run="one").result["disk_low"]["what"] == told["reason"]
        for op in ("follow", "wait"):
            events = agent.call(op, run="one", **({"timeout_s": 0} if op == "wait" else {})).events
            assert [event["what"] for event in events if event["event"] == "disk_low"] == [told["reason"]]
        save(checkpoints, 4, 2 << 20)
        agent.call("stop", run="one", grace_s=20)
        eventually(lambda: len(web.bodies) == 2)
    assert [event["event"] for event in web.events] == ["disk_low", "ended"]


def save(checkpoints: Path, step: int, size: int) -> None:
    """As a trainer does it: renamed once it is whole."""
    part = checkpoints / f"step-{step:06d}.part"
    part.mkdir(parents=True)
    (part / "model.safetensors").write_bytes(bytes(size))
    entry = {"path": "model.safetensors", "size": size, "sha256": "0" * 64, "role": "weights"}
    (part / "manifest.json").write_text(json.dumps({"v": 1, "kind": "checkpoint", "step": step, "files": [entry]}))
    part.rename(part.with_suffix(""))


def test_a_webhook_gets_the_end_though_it_fails_at_first(agent: Agent, work: Path, staged: Packed, web: Web) -> None:
    web.answers = [503]
    launch(agent, staged, {"webhook": web.url}, exit=3)
    assert ended(agent) == "FAILED"
    supervisor = supervisor_of(work)
    eventually(lambda: web.bodies)
    (event,) = web.events
    assert (event["event"], event["run"], event["state"], event["step"]) == ("ended", "one", "FAILED", 2)
    assert event["release"] == staged.digest
    assert event["text"].startswith("run one on ")
    assert event["text"].endswith(": FAILED")
    eventually(lambda: not alive(supervisor))
    # the URL lies in one file that is not shown
    holders = [path for path in work.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert holders == [work / "runs/one/notify.json"]
    assert holders[0].stat().st_mode & 0o777 == 0o600
    assert "notify.json" not in json.dumps(agent.call("files", run="one").result)
    with pytest.raises(AgentFailed) as caught:
        agent.call("read", run="one", path="notify.json")
    assert caught.value.kind == "file"
    assert SECRET not in json.dumps(agent.call("status", run="one").result)


def test_what_the_webhook_refuses_is_said_without_its_url(agent: Agent, work: Path, staged: Packed, web: Web) -> None:
    web.answers = [404]
    launch(agent, staged, {"webhook": web.url})
    assert ended(agent) == "SUCCEEDED"
    log = work / "runs/one/supervisor.log"
    eventually(lambda: "the webhook was not reached: it answered 404" in log.read_text())
    assert SECRET not in log.read_text()
    assert web.bodies == []
    eventually(lambda: agent.call("status", run="one").result["untold"])
    untold = agent.call("status", run="one").result["untold"]
    assert (untold["event"], untold["what"]) == ("ended", "the webhook was not reached: it answered 404")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["/nowhere/page-me"], "/nowhere/page-me cannot be run: No such file or directory"),
        (["sh", "-c", "exit 3"], "sh ended with exit code 3"),
    ],
    ids=["gone", "fails"],
)
def test_that_nobody_was_told_is_in_the_status(agent: Agent, staged: Packed, command: list[str], why: str) -> None:
    launch(agent, staged, {"command": command})
    assert ended(agent) == "SUCCEEDED"
    eventually(lambda: agent.call("status", run="one").result["untold"])
    assert agent.call("status", run="one").result["untold"]["what"] == why


def test_a_command_is_told_of_a_stall_and_of_the_end(agent: Agent, work: Path, staged: Packed, tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = ["sh", "-c", f'cat >>"{told}"; echo "paged $1"; env | grep -c DFLASH_OPS', "sh", "ann"]
    policy = {"grace_s": 60, "stall_s": 1}
    launch(agent, staged, {"command": command}, policy, records=[STEP], forever=True)
    assert ended(agent) == "FAILED"
    eventually(lambda: told.exists() and told.read_text().count("\n") == 2)
    # two processes tell it, each in its own time
    both = {event["event"]: event for event in map(json.loads, told.read_text().splitlines())}
    stalled, end = both["stalled"], both["ended"]
    assert (stalled["state"], stalled["step"]) == ("RUNNING", 7)
    assert end["state"] == "FAILED"
    assert "no metrics record for" in stalled["reason"]
    assert end["reason"] == stalled["reason"]
    log = work / "runs/one/supervisor.log"
    # what it prints is kept, and it carries no mark by which a stop would kill it
    eventually(lambda: log.read_text().count("paged ann\n0\n") == 2)


def test_a_command_that_never_stops_printing_fills_no_disk(agent: Agent, work: Path, staged: Packed) -> None:
    launch(agent, staged, {"command": ["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo the end"]})
    assert ended(agent) == "SUCCEEDED"
    supervisor, log = supervisor_of(work), work / "runs/one/supervisor.log"
    eventually(lambda: not alive(supervisor))
    assert "after 65536 bytes is left out" in log.read_text()
    assert 65536 <= log.stat().st_size < 70000


def test_nothing_waits_for_a_command_that_hangs(agent: Agent, work: Path, staged: Packed, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    launch(agent, staged, {"command": ["sh", "-c", f'echo $$ >"{pid}"; exec sleep 1000']}, forever=True)
    eventually(lambda: "ready" in agent.call("follow", run="one").log)
    stopped = agent.call("stop", run="one", grace_s=60).result
    assert (stopped["state"], stopped["remaining"]) == ("STOPPED", [])
    eventually(lambda: pid.exists() and pid.read_text().strip())
    hanging = int(pid.read_text())
    # the devices are free at once, whatever it does
    assert agent.call("free", **job(staged)).result["devices"] == stopped["devices"]
    eventually(lambda: not alive(hanging))
    eventually(lambda: "it took more than 10 s" in (work / "runs/one/supervisor.log").read_text())


@pytest.mark.parametrize(
    "notify",
    [
        {"webhook": f"file:///etc/{SECRET}"},
        {"command": []},
        {"command": f"{SECRET} -x"},
        {"webhook": 1},
        {"mail": SECRET},
    ],
)
def test_what_cannot_be_told_is_refused_before_the_launch(agent: Agent, staged: Packed, notify: dict[str, Any]) -> None:
    with pytest.raises(AgentFailed) as caught:
        launch(agent, staged, notify)
    assert (caught.value.kind, caught.value.exit) == ("request", 2)
    assert SECRET not in json.dumps(caught.value.error)
    assert agent.call("runs").result["runs"] == []
