"""What a person gets wrong: one clear message, and the documented exit code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Desk


def test_a_typo_in_a_playbook_names_file_line_and_nearest_key(desk: Desk) -> None:
    path = desk.folder / "playbooks" / "typo.yaml"
    path.write_text("version: 1\nworkload:\n  target: x\n  mask_token: m\ntraining:\n  steps: 3\n  learning_rat: 0.1\n")
    done = desk.deploy(playbook="typo")
    assert done.code == 2
    assert "typo.yaml:7" in done.error["what"]
    assert "learning_rate" in done.error["what"]


def test_a_typo_in_set(desk: Desk) -> None:
    done = desk.deploy("--set", "training.stepz=3")
    assert done.code == 2
    assert "steps" in done.error["what"]


def test_a_wrong_command_line_is_told_to_programs_too(desk: Desk) -> None:
    done = desk.run("status", "--hsot", "box", host=False)
    assert done.code == done.result["exit"] == 2
    assert "--hsot" in done.error["what"] and "--hsot" in done.err


def test_a_reason_is_one_line_of_text(desk: Desk) -> None:
    for reason in ("x\n- state: SUCCEEDED", os.fsdecode(b"\xff")):
        done = desk.deploy("--skip-canary", "--reason", reason)
        assert done.code == 2
        assert "one line of text" in done.error["what"]
    assert desk.run("runs").result["runs"] == []


def test_what_can_be_no_name_of_a_run_is_refused_before_the_host_is_reached(desk: Desk) -> None:
    run = desk.deploy().result["run"]
    # nobody listens there: whoever asks it ends with 4
    desk.write_host("away", "transport: ssh\nssh:\n  address: 127.0.0.1\n  port: 1\n")
    words = [[command, "--"] for command in ("status", "wait", "stop", "tail-logs", "collect", "resume")]
    words += [["export", "--out", "x", "--"], ["deploy", "--init-from"], ["deploy", "--release"]]
    for bad in ("no name", "-x-" * 2000, os.fsdecode(b"x\xa0"), "", f"runs/{run}/", f" {run}", f"{run[:-1]}?"):
        for word in words:
            host = [] if word[0] == "export" else ["--host", "away"]
            done = desk.type(word[0], *host, "--json", *word[1:], bad)
            assert (done.code, done.error["exit"]) == (2, 2), (word, bad, done.out)
            if word[0] == "deploy":
                assert done.error["where"] == word[-1]
            elif run[:-1] in bad:
                assert done.error["fix"] == f"did you mean '{run}'?", (word, bad)
    assert desk.type("status", "--host", "away", run).code == 4


def test_a_name_that_is_no_text_is_one_clear_error(desk: Desk) -> None:
    name = os.fsdecode(b"x\xff")
    for words, what in (
        (["status", "--host", name], r"there is no host 'x\udcff' (--host)"),
        (["deploy", "--host", "box", "--playbook", name], r"there is no playbook 'x\udcff'"),
        (["deploy", "--host", "box", "--playbook", f"{name}.yaml"], r"x\udcff.yaml: there is no such playbook file"),
        (["status", "--host", "box", name], r"'x\udcff' is no name of a run"),
        (["status", "--host", "box", "--inventory", name], r"x\udcff: there is no such inventory"),
    ):
        done = desk.type(*words, "--json")
        assert done.code == done.result["exit"] == 2, (words, done.out)
        assert what in done.error["what"], words
        assert "Traceback" not in done.err and "bug" not in done.error["what"]


def test_a_name_in_an_error_is_one_printable_line(desk: Desk) -> None:
    name = "x\ny\x1b[31m\u202e"
    shown = "x\\ny\\x1b[31m\\u202e"
    for words in (
        ["status", "--host", name],
        ["status", "--host", "box", name],
        ["deploy", "--host", "box", "--playbook", name],
        ["deploy", "--host", "box", "--playbook", f"{name}.yaml"],
        ["deploy", "--host", "box", "--set", f"{name}=1"],
        ["status", "--inventory", name],
        ["status", f"--{name}"],
        [name],
    ):
        done = desk.type(*words)
        assert (done.code, done.out) == (2, "")
        lines = [line for line in done.err.splitlines() if shown in line]
        assert lines and all(line.startswith(("error", "Error")) for line in lines), done.err
        assert "".join(done.err.split("\n")).isprintable(), done.err
    desk.environment["DFLASH_OPS_HOST"] = name
    assert shown in desk.run("status", host=False).error["what"]


def test_an_absurd_number_is_one_error_with_the_range(desk: Desk) -> None:
    for words in (
        ["stop", "--grace", "1e20"],
        ["stop", "--grace", "1" * 5000],
        ["wait", "--timeout", "inf"],
        ["wait", "--timeout", "nan"],
        ["wait", "--timeout", "1" * 23],
        ["wait", "--timeout", "-1"],
        ["tail-logs", "-n", "1" * 23],
        ["prune", "--keep-runs", "1" * 23],
        ["deploy", "--restart", "101"],
        ["export", "--out", "x", "--step", "1" * 23],
    ):
        done = desk.type(*words, "--json")
        assert done.code == 2
        assert "a whole number from 0 to" in done.error["what"] and len(done.error["what"]) < 200, done.error
    assert desk.deploy("--init-from", f"x:{'1' * 5000}").code == 2


def test_a_name_that_is_no_text_leaves_the_ledger(desk: Desk) -> None:
    assert desk.deploy().code == 0
    assert desk.run("status", os.fsdecode(b"x\xa0")).code == 2
    assert len(desk.run("runs").result["runs"]) == 1


def test_a_full_disk_behind_the_output_is_one_line(desk: Desk) -> None:
    # what is told first: an event, an error, the result
    for words in (["runs", "--host", desk.host], ["status", "--host", "none-such"], ["runs", "--all"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                desk.argv(*words, "--json"),
                cwd=desk.folder, env=desk.env(), stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
        assert done.returncode == 5, done.stderr
        assert [line.split()[0] for line in done.stderr.splitlines()] == ["error"], done.stderr


def test_what_is_no_ssh_server_is_one_error_without_a_traceback(desk: Desk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        port = listening.getsockname()[1]
        desk.write_host("box", f"transport: ssh\nssh:\n  address: 127.0.0.1\n  port: {port}\n")
        told = desk.type("runs", "--host", "box")
        assert (told.code, told.out) == (4, "")
        assert [line.split()[0] for line in told.err.splitlines()] == ["error", "where", "next"], told.err
        # the host is being reached while the playbook is read
        refused = desk.type("deploy", "--host", "box", "--playbook", "none-such")
        assert (refused.code, refused.out) == (2, "")
        assert [line.split()[0] for line in refused.err.splitlines()] == ["error"], refused.err
        listening.shutdown(socket.SHUT_RDWR)


def test_an_unknown_host_names_the_known_ones(desk: Desk) -> None:
    done = desk.type("status", "--host", "bax")
    assert done.code == 2
    assert "box" in done.err


def test_without_host_the_only_one_is_taken_and_told(desk: Desk) -> None:
    done = desk.run("runs", host=False)
    assert done.code == 0, done.out
    assert done.named("chosen")[0]["host"] == "box"
    desk.write_host("other", f"transport: local\nworkdir: {desk.folder / 'elsewhere'}\n")
    assert desk.run("runs", host=False).code == 2
    desk.environment["DFLASH_OPS_HOST"] = "other"
    assert desk.run("runs", host=False).named("chosen")[0]["host"] == "other"
    del desk.environment["DFLASH_OPS_HOST"]
    desk.deploy()
    assert desk.run("runs", host=False).named("chosen")[0]["host"] == "box"


def test_a_patch_that_does_not_fit(desk: Desk) -> None:
    patch = desk.folder / "bad.patch"
    patch.write_text("--- a/tiny_trainer/model.py\n+++ b/tiny_trainer/model.py\n@@ -1 +1 @@\n-not there\n+there\n")
    playbook = desk.folder / "playbooks" / "tiny.yaml"
    text = json.loads(playbook.read_text())
    text["trainer"]["patches"] = [str(patch)]
    playbook.write_text(json.dumps(text))
    done = desk.run("build", "--playbook", "tiny", host=False)
    assert done.code == 3
    assert "tiny_trainer/model.py" in json.dumps(done.error)


def test_a_missing_python(desk: Desk) -> None:
    desk.write_host("box", f"transport: local\nworkdir: {desk.folder / 'work'}\npython: /nowhere/python3\n")
    done = desk.run("doctor", "--playbook", "tiny")
    assert done.code == 5
    assert "/nowhere/python3" in done.error["what"]


def test_cuda_required_and_none_there(desk: Desk) -> None:
    done = desk.run("doctor", "--playbook", "tiny", "--set", "require_cuda=true")
    assert done.code == 5
    assert "require_cuda" in done.error["fix"]


def test_settings_that_the_trainer_refuses(desk: Desk) -> None:
    done = desk.deploy("--set", "mask_token=<nope>")
    assert done.code == 5
    assert "mask_token" in json.dumps(done.error)
    assert desk.run("runs").result["runs"] == []


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk(desk: Desk, full_disk: Path) -> None:
    (full_disk / "ballast").write_bytes(b"x" * (900 << 10))
    desk.write_host("box", f"transport: local\nworkdir: {full_disk / 'work'}\n")
    done = desk.deploy()
    assert done.code == 5, done.out
    assert "space" in json.dumps(done.error).lower()
    assert not list(full_disk.rglob("*.part"))


def test_every_command_ends_with_a_result_and_every_path_in_it_is_absolute(desk: Desk) -> None:
    deployed = desk.deploy()
    (checkpoint,) = (desk.runs / deployed.result["run"]).glob("checkpoints/*-000004")
    here = ["--playbook", "tiny", "--init-from", os.path.relpath(checkpoint, desk.folder)]
    commands = [["status"], ["runs"], ["collect"], ["stop"], ["tail-logs"], ["doctor", "--playbook", "tiny"]]
    commands += [["canary", "--playbook", "tiny"], ["prune"], ["deploy", *here, "--dry-run"]]
    ended = [deployed, *(desk.run(*words) for words in commands)]
    ended.append(desk.run("check", "--playbook", "tiny", host=False))
    ended.append(desk.run("build", "--playbook", "tiny", "--out", "here.tgz", host=False))
    assert ended[-1].result["archive"] == str(desk.folder.resolve() / "here.tgz")
    for done in ended:
        assert done.result["exit"] == done.code == 0, done.out
        assert len(done.result.get("release") or "0" * 64) == 64
        assert [found for event in done.events for found in _relative(event, desk)] == []
    (record,) = deployed.named("record")
    assert record["folder"] == deployed.result["folder"]


def _relative(value: Any, desk: Desk, key: str = "") -> Iterator[str]:
    """Texts that name a file here, or in the host's work directory, for those alone who stand there."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _relative(item, desk, name)
    elif isinstance(value, list):
        for item in value:
            yield from _relative(item, desk, key)
    elif isinstance(value, str):
        words = [word for word in value.split() if not word.startswith("/") and ("/" in word or key == "folder")]
        places = (desk.folder, desk.folder / "work")
        yield from (f"{key}: {value}" for place in places for word in words if (place / word).exists())


def test_help_has_an_example_for_every_command(desk: Desk) -> None:
    shown = desk.type("--help").out
    for command in ("deploy", "canary", "tail-logs", "build", "check", "doctor", "status", "stop", "collect", "runs"):
        assert command in shown
        assert f"Example: dflash-ops {command}" in desk.type(command, "--help").out
    near = desk.type("tail-log")
    assert near.code == 2
    assert "tail-logs" in near.err


def test_a_full_disk_on_the_workstation(desk: Desk, full_disk: Path) -> None:
    (full_disk / "ballast").write_bytes(b"x" * (1000 << 10))
    done = desk.deploy("--runs", str(full_disk / "runs"))
    assert done.code == 5, done.out
    assert done.error["where"] == "this workstation"
    assert "No space left" in done.error["what"]
    assert str(full_disk / "runs") in done.error["what"] and "bytes free" in done.error["what"]
    assert "--runs" in done.error["fix"] and "nothing was launched" in done.error["fix"]
    assert done.result["exit"] == 5
    # nothing half-written has a final name there, and the run (if it was launched) belongs to the host
    assert not list(full_disk.rglob("*.tmp"))


def test_a_disk_that_fills_while_a_run_comes_home(desk: Desk, full_disk: Path) -> None:
    run = desk.deploy("--detach").result["run"]
    assert desk.run("wait", run).code == 0
    log = desk.folder / "work" / "runs" / run / "log" / "000000.log"
    with log.open("ab") as file:
        file.write(b"x" * (2 << 20))
    done = desk.run("collect", run, "--runs", str(full_disk / "runs"))
    assert done.code == done.result["exit"] == 5, done.out
    told = re.search(r": (\d+) bytes free, (\d+) needed, (\d+) missing$", done.error["what"])
    assert told and str(full_disk / "runs" / run) in done.error["what"], done.error
    free, needed, missing = map(int, told.groups())
    assert needed > 1 << 20 and missing == needed - free
    assert f"`dflash-ops collect {run}`" in done.error["fix"] and "--runs" in done.error["fix"]
    assert desk.run("collect", run).code == 0
