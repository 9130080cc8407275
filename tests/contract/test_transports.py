"""What every transport must do, the same for local, ssh and pct: bytes, streams, arguments, and whole deploys."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_ops.config import load_host
from dflash_ops.errors import OpsError
from dflash_ops.transport import Channel, Conversation, Transport, transport_for
from tests.commands import Desk

HOSTILE = ["a b", "x'y", 'x"y', "$(touch /tmp/dflash-pwned)", "`id`", "a;b", "--", "-n", "*", "\\", "new\nline", "ü"]


@pytest.fixture
def transport(desk: Desk) -> Iterator[Transport]:
    host, _ = load_host("box", desk.folder / "hosts", env={}, last_host=None)
    made = transport_for(host, lambda text: None)
    yield made
    made.close()


@pytest.fixture
def conversation(desk: Desk, transport: Transport) -> Iterator[Conversation]:
    host, _ = load_host("box", desk.folder / "hosts", env={}, last_host=None)
    with Conversation(transport, python=sys.executable, workdir=host.workdir, host="box") as talk:
        yield talk


MARK = "the-program-begins-here"


def read_all(channel: Channel) -> bytes:
    """What the program printed after MARK; what comes before it is the way there speaking."""
    data = b""
    while chunk := channel.read(65536):
        data += chunk
    return data.partition(f"{MARK}\n".encode())[2]


def test_arguments_only_name_things(transport: Transport) -> None:
    script = f"import json,sys; print('{MARK}'); print(json.dumps(sys.argv[1:]))"
    channel = transport.open([sys.executable, "-I", "-X", "utf8", "-c", script, *HOSTILE])
    assert json.loads(read_all(channel)) == HOSTILE
    channel.close()
    assert not Path("/tmp/dflash-pwned").exists()


def test_streams_stay_apart_and_bytes_are_whole(transport: Transport) -> None:
    script = (
        f"import sys; print('{MARK}', flush=True); data=sys.stdin.buffer.read(3000000);"
        "sys.stderr.write('e'*300000); sys.stderr.flush();"
        "sys.stdout.buffer.write(data[::-1]); sys.exit(7)"
    )
    channel = transport.open([sys.executable, "-I", "-c", script])
    data = os.urandom(3_000_000)
    channel.write(data)
    assert read_all(channel) == data[::-1]
    assert set(channel.stderr()) == {"e"}
    assert channel.wait(120) == 7
    channel.close()


def test_the_agent_tells_facts(conversation: Conversation) -> None:
    facts = conversation.request("facts")
    assert facts["python_executable"] == sys.executable
    assert facts["uid"] == os.geteuid()
    assert facts["disk_free_bytes"] > 0
    # a container's boot is its own
    assert re.fullmatch(r"[0-9a-f-]{36}", facts["boot_id"])
    assert conversation.request("probe", {"python": sys.executable})["version"].startswith("3.")


def test_an_agents_refusal_is_typed(conversation: Conversation) -> None:
    with pytest.raises(OpsError) as refused:
        conversation.request("status", {"run": "20200101-000000-nope-0000"})
    assert "20200101-000000-nope-0000" in refused.value.what
    # the conversation goes on after a refusal
    assert conversation.request("runs") == {"runs": []}


def test_a_whole_deploy(desk: Desk) -> None:
    first = desk.deploy()
    assert first.code == 0, first.out + first.err
    folder = desk.runs / first.result["run"]
    assert (folder / "checkpoints" / "step-000012" / "manifest.json").exists()
    assert first.log == (folder / "log" / "000000.log").read_text().splitlines()
    assert first.named("staged")[0]["sent"] > 0
    second = desk.deploy()
    assert second.code == 0, second.out + second.err
    assert second.named("staged")[0]["sent"] == 0
    assert second.named("verdict")[0]["reused"]


def test_stop_leaves_nothing_and_collect_brings_it_home(desk: Desk) -> None:
    desk.write_playbook("slow", faults=("slow-steps",), training={"steps": 5000})
    started = desk.deploy("--detach", playbook="slow")
    assert started.code == 0, started.out + started.err
    stopped = desk.run("stop")
    assert stopped.result["state"] == "STOPPED"
    assert stopped.result["remaining"] == []
    assert desk.run("collect").code == 0
    result = json.loads((desk.runs / started.result["run"] / "result.json").read_text())
    assert result["outcome"] == "stopped"
