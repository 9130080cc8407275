"""What `runs` and `status` say where the host does not answer, and how the workstation's ledger comes back."""

from __future__ import annotations

from pathlib import Path

from tests.commands import Desk

NOBODY = "transport: ssh\npython: python3\nssh:\n  address: 127.0.0.1\n  port: 1\n  known_hosts: known\n"


def test_what_was_known_is_told_with_its_age_and_read_anew(desk: Desk) -> None:
    ledger = desk.folder / "home" / ".local/state/dflash-ops/ledger.sqlite3"
    assert desk.run("runs", "--all", host=False).result["runs"] == []
    run = desk.deploy("--detach").result["run"]
    box = (desk.folder / "hosts" / "box.yaml").read_text()
    desk.write_host("other", NOBODY)

    # the host of the last run, and what it says is remembered
    told = desk.run("runs", host=False)
    assert told.named("chosen")[0]["why"] == "host of the last run"
    assert told.result["runs"] == [run]

    # a command that is offered names a run, whichever host was the last
    desk.environment["DFLASH_OPS_HOST"] = "other"
    asked = desk.run("status", run, host=False)
    assert (asked.code, asked.named("chosen")[0]["host"]) == (0, "box")
    del desk.environment["DFLASH_OPS_HOST"]

    desk.write_host("box", NOBODY)
    for command in ("runs", "status"):
        known = desk.run(command)
        assert known.code == 4
        (one,) = known.named("run")
        assert (one["run"], one["host"], one["playbook"], one["devices"]) == (run, "box", "tiny", ["cpu"])
        assert one["as_of"] > one["started"]
        assert one["folder"] == str((desk.runs / run).resolve())
    shown = desk.type("runs", "--all")
    assert shown.code == 0
    (canary, line) = sorted(shown.err.splitlines(), key=lambda text: "canary pass" not in text)
    assert f"box  {run}" in line
    assert "as of 20" in line
    assert "canary pass" in canary

    # damaged: no command minds, and the hosts know it all
    desk.write_host("box", box)
    ledger.write_bytes(b"damaged" * 1000)
    told = desk.run("runs")
    assert told.result["runs"] == [run]
    assert "set aside" in told.named("notice")[0]["text"]
    ledger.unlink()
    again = desk.run("runs", "--rebuild", host=False)
    assert again.code == 4, "the other host does not answer, and that is said"
    assert "other" in again.error["what"]
    assert [(one["runs"], one["canaries"]) for one in again.named("read")] == [(1, 1)]
    kinds = {one["kind"]: one["run"] for one in again.named("run")}
    assert kinds["run"] == run
    assert kinds["canary"] in {path.name for path in Path(desk.folder / "work" / "canary").iterdir()}


def test_back_to_the_release_before(desk: Desk) -> None:
    first = desk.run("canary", "--playbook", "tiny").result["release"]
    assert desk.run("rollback", "--playbook", "tiny").code == 2
    desk.write_playbook("worse", faults=("slow-steps",))
    second = desk.run("canary", "--playbook", "worse").result["release"]
    done = desk.run("rollback", "--playbook", "tiny")
    assert done.code == 0, done.out
    assert (done.result["current"], done.result["previous"]) == (first, second)
    assert (desk.folder / "work" / "current").resolve().name == first
    # and that very release can be launched, by its verdict, whatever the tree here is by now
    desk.write_playbook(faults=("syntax-error",))
    again = desk.deploy("--release", "current", "--detach")
    assert again.code == 0, again.out
    assert (again.result["release"], again.named("verdict")[0]["reused"]) == (first, True)
    assert not again.named("built")
    (run,) = desk.run("runs").named("run")
    assert run["release"] == first
    wrong = desk.deploy("--release", second[:7])
    assert wrong.code == 2
    assert second[:12] in wrong.error["what"]


def test_a_ledger_that_cannot_be_read_knows_nothing_and_does_not_say_there_is_nothing(desk: Desk) -> None:
    ledger = desk.folder / "home/.local/state/dflash-ops/ledger.sqlite3"
    assert "knows of no run yet" in desk.type("runs", "--all").err
    ledger.mkdir(parents=True)
    said = desk.type("runs", "--all").err
    assert "cannot be used now" in said
    assert "no run" not in said
