"""Hosts that cannot be reached, or are not what they should be: one message, the right code."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import TINY, Desk, local_desk
from tests.contract.conftest import pct_host, ssh_host
from tests.deploy.in_process import failed_deploy, sit_down
from tests.rig.rig import Rig

pytestmark = pytest.mark.rig


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return local_desk(tmp_path)


BOTH_WAYS_IN = pytest.mark.parametrize("plain", [True, False], ids=["lxc-attach", "pct"])


@BOTH_WAYS_IN
def test_a_stopped_container(desk: Desk, rig: Rig, plain: bool) -> None:
    desk.write_host("box", pct_host(rig, container=rig.stopped_container_id, plain=plain))
    done = desk.run("runs")
    assert done.code == 4
    assert "201 is not running" in done.error["what"]
    assert "pct start 201" in done.error["fix"]


@BOTH_WAYS_IN
def test_a_wrong_container_id(desk: Desk, rig: Rig, plain: bool) -> None:
    desk.write_host("box", pct_host(rig, container=rig.missing_container_id, plain=plain))
    done = desk.run("runs")
    assert done.code == 4
    assert "no container 999" in done.error["what"]
    assert "pct list" in done.error["fix"]


@BOTH_WAYS_IN
def test_a_container_on_another_node_of_the_cluster(desk: Desk, rig: Rig, plain: bool) -> None:
    desk.write_host("box", pct_host(rig, container=rig.elsewhere_container_id, plain=plain))
    done = desk.run("runs")
    assert done.code == 4
    assert f"300 is on node {rig.elsewhere_node}" in done.error["what"]
    assert rig.elsewhere_node in done.error["fix"]


def test_the_doctor_tells_of_the_node(desk: Desk, rig: Rig) -> None:
    desk.write_host("box", pct_host(rig))
    conf = rig.pct_conf_dir / f"{rig.container_id}.conf"
    plain = conf.read_text()
    secret = "#a description\nlxc.environment: TOKEN=hush\n"
    conf.write_text(f"{secret}features: keyctl=1,nesting=1\nlock: backup\n{plain}[before]\nmemory: 7\n")
    try:
        done = desk.run("doctor", "--playbook", "tiny")
    finally:
        conf.write_text(plain)
    assert done.code == 0, done.out
    node = [(one["level"], one["what"]) for one in done.named("diagnosis") if one["layer"] == "node"]
    told = "container 200: 2048 MiB memory and 512 MiB swap, 2 cores, unprivileged, nesting"
    assert node == [("ok", f"{os.uname().nodename}; {told}"), ("warning", "container 200 is locked (backup)")]
    assert "hush" not in done.out + done.err


def test_no_pct_on_the_node(desk: Desk, rig: Rig) -> None:
    desk.write_host("box", pct_host(rig).replace(str(rig.folder / "sbin" / "pct"), "/usr/sbin/no-such-pct"))
    done = desk.run("runs")
    assert done.code == 4
    assert "no pct" in done.error["what"]


def test_an_unknown_host_key(desk: Desk, rig: Rig, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.touch()
    text = ssh_host(rig, tmp_path / "work").replace(str(rig.known_hosts), str(empty))
    desk.write_host("box", text)
    done = desk.run("runs")
    assert done.code == 4
    assert rig.host_key_fingerprint in done.error["what"]
    assert empty.read_text() == ""
    desk.write_host("box", text + "  host_key: accept-new\n")
    accepted = desk.run("runs")
    assert accepted.code == 0, accepted.out
    assert rig.host_key_fingerprint in accepted.named("notice")[0]["text"]
    desk.write_host("box", text)
    assert desk.run("runs").code == 0


def test_a_changed_host_key(desk: Desk, rig: Rig, tmp_path: Path) -> None:
    other = rig.identity.with_suffix(".pub").read_text().split()[1]
    changed = tmp_path / "known_hosts"
    changed.write_text(f"[127.0.0.1]:{rig.port} ssh-ed25519 {other}\n")
    desk.write_host(
        "box", ssh_host(rig, tmp_path / "work").replace(str(rig.known_hosts), str(changed)) + "  host_key: accept-new\n"
    )
    done = desk.run("runs")
    assert done.code == 4
    assert f"[127.0.0.1]:{rig.port} has CHANGED: it is {rig.host_key_fingerprint} now" in done.error["what"]
    # what it names takes away that key, and no other
    forget = done.error["fix"].split("`")[1]
    subprocess.run(shlex.split(forget), check=True, capture_output=True)
    assert desk.run("runs").code == 0


def test_a_pinned_fingerprint(desk: Desk, rig: Rig, tmp_path: Path) -> None:
    text = ssh_host(rig, tmp_path / "work")
    desk.write_host("box", text + f"  fingerprint: {rig.host_key_fingerprint}\n")
    assert desk.run("runs").code == 0
    wrong = "SHA256:" + "A" * 43
    desk.write_host("box", text + f"  fingerprint: {wrong}\n")
    done = desk.run("runs")
    assert done.code == 4
    assert wrong in done.error["what"]


def test_nobody_listens(desk: Desk, rig: Rig, tmp_path: Path) -> None:
    desk.write_host("box", ssh_host(rig, tmp_path / "work").replace(f"port: {rig.port}", "port: 1"))
    done = desk.run("runs")
    assert done.code == 4
    assert "127.0.0.1:1" in done.error["what"]


def test_a_key_that_is_refused(desk: Desk, rig: Rig, tmp_path: Path) -> None:
    stranger = rig.folder / "host_key"
    desk.write_host("box", ssh_host(rig, tmp_path / "work").replace(str(rig.identity), str(stranger)))
    done = desk.run("runs")
    assert done.code == 4
    assert "refused the login" in done.error["what"]


def test_a_missing_python_in_the_container(desk: Desk, rig: Rig) -> None:
    desk.write_host("box", pct_host(rig).replace(sys.executable, "/nowhere/python3"))
    done = desk.run("runs")
    assert done.code == 5
    assert "/nowhere/python3" in done.error["what"]


@pytest.mark.parametrize("transfer", ["stream", "push"])
def test_a_full_disk_in_the_container(desk: Desk, rig: Rig, transfer: str) -> None:
    with rig.full_disk("/var/full", 300 << 10):
        desk.write_host("box", pct_host(rig, transfer=transfer, workdir="/var/full/work"))
        done = desk.deploy()
        left = rig.exec_in_container(["find", "/var/full", "-name", "*.part", "-o", "-name", "incoming*"]).stdout
    assert done.code == 5, done.out
    assert "space" in json.dumps(done.error).lower()
    assert left == ""


def test_push_leaves_nothing_on_the_node(desk: Desk, rig: Rig, tmp_path: Path) -> None:
    desk.write_host("box", pct_host(rig, transfer="push", workdir=f"/var/lib/{tmp_path.name}"))
    assert desk.deploy("--detach").code == 0
    assert rig.left_of_pushes() == []
    listed = rig.exec_in_container(["ls", f"/var/lib/{tmp_path.name}"]).stdout
    assert "incoming" not in listed


def test_a_container_that_stops_during_a_canary_is_inconclusive(desk: Desk, rig: Rig, tmp_path: Path) -> None:
    desk.write_host("box", pct_host(rig, workdir=f"/var/lib/{tmp_path.name}"))
    desk.write_playbook("hanging", faults=("worker-hangs",), workload={"canary_timeout_s": 600})
    with desk.started("deploy", "--playbook", "hanging") as process:
        process.until_event("canary")
        rig.stop_container()
        try:
            events = process.rest()
        finally:
            rig.start_container()
    result = events[-1]
    assert process.code == result["exit"] == 7
    assert result["verdict"] == "inconclusive"
    (error,) = [event for event in events if event["event"] == "error"]
    assert "was stopped" in error["what"] and f"pct start {rig.container_id}" in error["fix"]
    assert desk.run("runs").result["runs"] == []
    # and the lock that the killed agent left does not outlive its boot
    desk.write_playbook()
    assert desk.deploy("--detach").code == 0


def test_a_container_that_stops_during_an_upload_is_told_as_that(
    desk: Desk, rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.write_host("box", pct_host(rig, workdir=f"/var/lib/{tmp_path.name}"))
    playbook = desk.folder / "playbooks" / "tiny.yaml"
    (desk.folder / "target.json").write_bytes((TINY / "target.json").read_bytes())
    text = json.loads(playbook.read_text())
    text["assets"] = {"model": {"upload": str(desk.folder / "target.json")}}
    text["workload"]["target"] = "asset:model"
    playbook.write_text(json.dumps(text))
    sit_down(desk, monkeypatch)
    try:
        error, outcome = failed_deploy("sending", rig.stop_container)
    finally:
        rig.start_container()
    assert (error.kind, error.exit_code, outcome.run) == ("container_stopped", 4, None)
    assert f"container {rig.container_id} was stopped" in error.what
    assert f"pct start {rig.container_id}" in error.fix and "run the same command again" in error.fix
    # which is right
    assert desk.deploy("--detach").code == 0


def test_a_container_that_stops_during_a_run_loses_it_honestly(desk: Desk, rig: Rig, tmp_path: Path) -> None:
    desk.write_host("box", pct_host(rig, workdir=f"/var/lib/{tmp_path.name}"))
    desk.write_playbook("slow", faults=("slow-steps",), training={"steps": 5000})
    started = desk.deploy("--detach", playbook="slow")
    assert started.code == 0, started.out
    rig.stop_container()
    try:
        assert desk.run("status").code == 4
    finally:
        rig.start_container()
    status = desk.run("status")
    assert status.code == 0
    assert status.result["run"] == started.result["run"]
    # `pct stop` kills the container's PID 1; then the kernel sends SIGKILL to every process of its PID namespace before
    # any of them can tell another that it has ended, so its supervisor has no last word
    assert status.result["state"] == "LOST"
