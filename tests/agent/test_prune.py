"""What `prune` takes from a host, and what it never does."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.agent import prune as pruning
from dflash_ops.agent.files import digest_of
from dflash_ops.agent.orphans import mark_running
from dflash_ops.agent.processes import ProcessId, boot_id
from dflash_ops.agent.prune import Limits, plan
from dflash_ops.agent.workdir import WorkDir
from tests.agent.client import Agent, AgentFailed, eventually, manifest_of

NONE = Limits(runs=0, releases=0, environments=0, prepared=0, collected=None)


class Host:
    """A work directory as months of use leave it, written by hand; what comes later is newer."""

    def __init__(self, root: Path) -> None:
        self.work = WorkDir.open(str(root))
        self._time = 1_000_000

    def _dated(self, path: Path) -> Path:
        self._time += 1
        os.utime(path, (self._time, self._time))
        return path

    def release(self, name: str) -> str:
        digest, manifest = manifest_of({"code.py": name.encode()})
        path = self.work.release(digest)
        path.mkdir()
        (path / "code.py").write_text(name)
        _write(path / "manifest.json", manifest)
        self._dated(path).chmod(0o555)
        return digest

    def prepared(self, name: str, *, whole: bool = True) -> Path:
        path = self.work.cache / "prepared" / name
        path.mkdir()
        if whole:
            (path / "prepare.json").write_text("{}")
        return self._dated(path)

    def run(
        self,
        name: str,
        *,
        release: str = "",
        prepared: Path | None = None,
        target: Path | None = None,
        init_from: Path | None = None,
        resume_from: Path | None = None,
        running: bool = False,
    ) -> Path:
        self._time += 1
        path = self.work.runs / name
        (path / "out/checkpoints").mkdir(parents=True)
        assets = {} if target is None else {"target": {"path": str(target / "weights"), "sha256": target.name}}
        record = {"run": name, "started": self._time, "release": release, "devices": ["cpu"], "assets": assets}
        _write(path / "run.json", record)
        training = {"resume_from": resume_from and str(resume_from), "init_from": init_from and str(init_from)}
        _write(path / "settings.json", {"prepared": prepared and str(prepared), "training": training})
        if running:
            _write(path / "state.json", {"boot_id": boot_id(), "supervisor": _me()})
        else:
            _write(path / "exit.json", {"state": "SUCCEEDED"})
        return path

    def asset(self, name: str) -> Path:
        path = self.work.assets / digest_of(name)
        path.mkdir(parents=True)
        (path / "weights").write_text(name)
        self._dated(path).chmod(0o555)
        return path

    def verdict(self, release: str, *, made: float, outcome: str = "pass", devices: str = "cpu") -> None:
        binding = {"release": release, "devices": [devices]}
        fields = {"made": made, "boottime_s": 0, "max_age_s": 1, "evidence": {}, "log": "", "playbook": None}
        digest = digest_of(binding)
        _write(
            self.work.verdicts / f"{digest}.json",
            {"v": 1, "outcome": outcome, "binding": binding, "digest": digest, **fields},
        )

    def activate(self, release: str) -> None:
        self.work.record("activate", release=release)

    def link(self, name: str, release: str) -> None:
        (self.work.root / name).symlink_to(Path("releases") / release)

    def fates(self, limits: Limits = NONE) -> dict[str, tuple[str, str]]:
        return {item.name: (item.fate, item.why) for item in plan(self.work, limits)}

    def going(self, limits: Limits = NONE) -> set[str]:
        return {name for name, (fate, _) in self.fates(limits).items() if fate == "goes"}


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))


def _me() -> dict[str, int]:
    me = ProcessId.of(os.getpid())
    assert me
    return me.to_json()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "work")


def test_the_newest_runs_stay_and_those_that_are_not_home(host: Host) -> None:
    for name in ("a", "b", "c", "d"):
        host.run(name)
    fates = host.fates(Limits(1, 0, 0, 0, collected={"a", "d"}))
    assert {name: fate for name, (fate, _) in fates.items()} == {"d": "stays", "c": "stays", "b": "stays", "a": "goes"}
    assert fates["d"][1] == "one of the 1 newest"
    assert "not whole on your workstation" in fates["c"][1]
    assert host.going(Limits(1, 0, 0, 0, collected=None)) == {"a", "b", "c"}


def test_a_running_run_never_goes_and_neither_does_what_it_has(host: Host) -> None:
    release, data = host.release("a"), host.prepared("data")
    parent = host.run("parent")
    source = parent / "out/checkpoints/step-000004"
    host.run("child", release=release, prepared=data, resume_from=source, running=True)
    host.run("other")
    fates = host.fates()
    assert "is running" in fates["child"][1]
    assert fates["parent"] == ("stays", "run child goes on from it")
    assert fates[release] == ("stays", "run child has it")
    assert fates["data"] == ("stays", "run child has it")
    assert host.going() == {"other"}


def test_a_parent_stays_also_where_the_clock_was_set_back_before_its_child_began(host: Host) -> None:
    child = host.run("child", running=True)
    grandparent = host.run("grandparent")
    parent = host.run("parent", resume_from=grandparent / "out/checkpoints/step-000002")
    source = parent / "out/checkpoints/step-000004"
    _write(child / "settings.json", {"prepared": None, "training": {"resume_from": str(source)}})
    fates = host.fates()
    assert fates["parent"] == ("stays", "run child goes on from it")
    assert fates["grandparent"] == ("stays", "run parent goes on from it")


def test_what_a_link_leads_to_is_the_same_work_directory(host: Host, tmp_path: Path) -> None:
    data = host.prepared("data")
    host.run("running", prepared=data, running=True)
    (tmp_path / "link").symlink_to(host.work.root)
    through_link = plan(WorkDir.open(str(tmp_path / "link")), NONE)
    assert {item.name: item.fate for item in through_link} == {"running": "stays", "data": "stays"}


@pytest.mark.parametrize("name", ["profiles/trace.json", ".history"])
def test_a_run_with_files_that_collect_does_not_bring_stays_unless_that_does_not_matter(host: Host, name: str) -> None:
    file = host.run("a") / "out" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("of its trainer")
    fate, why = host.fates(Limits(0, 0, 0, 0, collected={"a"}))["a"]
    assert (fate, why) == ("stays", f"collect does not bring out/{name.partition('/')[0]}")
    assert host.going() == {"a"}


def test_a_run_that_is_being_collected_stays(host: Host) -> None:
    pin = host.run("a") / "pins/1.json"
    pin.parent.mkdir()
    _write(pin, {"boot_id": boot_id(), "agent": _me(), "checkpoints": ["step-000004"]})
    assert host.fates()["a"] == ("stays", "it is being collected")
    _write(pin, {"boot_id": "another", "agent": _me(), "checkpoints": ["step-000004"]})
    assert host.going() == {"a"}


def test_current_previous_and_what_a_rollback_goes_to_stay(host: Host) -> None:
    names = ("old", "good", "failed", "gpu", "previous", "current", "newest")
    digests = {name: host.release(name) for name in names}
    for name in names[:-1]:
        host.activate(digests[name])
    host.link("previous", digests["previous"])
    host.link("current", digests["current"])
    host.verdict(digests["old"], made=1)
    host.verdict(digests["good"], made=2)
    host.verdict(digests["failed"], made=3, outcome="fail")
    host.verdict(digests["current"], made=4)
    host.verdict(digests["gpu"], made=1, devices="GPU-1")
    why = {name: host.fates(Limits(0, 1, 0, 0, None))[digest][1] for name, digest in digests.items()}
    assert (why["current"], why["previous"]) == ("current", "previous")
    assert why["good"] == why["gpu"] == "the last one before it whose canary passed: a rollback goes there"
    assert why["newest"] == "one of the 1 newest"
    assert host.going(Limits(0, 1, 0, 0, None)) == {digests["old"], digests["failed"]}


def test_releases_and_data_of_runs_that_stay_stay(host: Host) -> None:
    kept, gone = host.release("kept"), host.release("gone")
    used, old, unfinished = host.prepared("used"), host.prepared("old"), host.prepared("half", whole=False)
    newest, going_on = host.prepared("newest"), host.prepared("going-on", whole=False)
    (going_on / "answers.ndjson").write_text("{}\n")
    host.run("a", release=gone, prepared=old)
    host.run("b", release=kept, prepared=used)
    assert host.going(Limits(1, 0, 0, 1, None)) == {"a", gone, old.name, unfinished.name}
    fates = host.fates(Limits(1, 0, 0, 1, None))
    assert fates[newest.name][0] == "stays"
    assert fates[going_on.name] == ("stays", "it is half made, and may go on within a day")


def test_assets_of_runs_that_stay_and_of_jobs_that_live_stay(host: Host) -> None:
    target, start, of_job, gone, newest = (host.asset(name) for name in ("target", "start", "job", "gone", "newest"))
    host.run("old", target=gone)
    host.run("kept", target=target, init_from=start)
    canary = host.work.canaries / "c"
    canary.mkdir()
    mark_running(canary, "canary", [], None)
    _write(canary / "settings.json", {"workload": {"target": str(of_job)}})
    fates = host.fates(Limits(1, 0, 0, 0, None, assets=1))
    assert fates[target.name] == fates[start.name] == ("stays", "run kept has it")
    assert fates[of_job.name] == ("stays", "canary c has it")
    assert fates[newest.name] == ("stays", "one of the 1 newest")
    assert host.going(Limits(1, 0, 0, 0, None, assets=1)) == {"old", gone.name}
    # an upload that broke off: a moment ago, or long ago
    for name, age_s in (("a" * 64, 0), ("b" * 64, 100_000)):
        part = host.work.assets / f"{name}.part" / "incoming"
        part.mkdir(parents=True)
        (part / "file").write_text("half")
        for path in (part / "file", part, part.parent):
            os.utime(path, (time.time() - age_s,) * 2)
    assert host.going(Limits(1, 0, 0, 0, None, assets=1)) == {"old", gone.name, "b" * 64 + ".part"}


def test_caches_go_when_asked_and_nobody_runs(host: Host) -> None:
    for name in ("inductor", "other"):
        (host.work.cache / name / "ab").mkdir(parents=True)
        (host.work.cache / name / "ab" / "kernel.so").write_bytes(b"x" * 10_000)
    assert host.going() == set()
    for name in ("tuning", "throughput"):
        (host.work.cache / name).mkdir()
    assert "prune --caches" in host.fates()["inductor"][1]
    asked = Limits(0, 0, 0, 0, None, caches=True)
    assert host.going(asked) == {"inductor", "other"}
    (item,) = [item for item in plan(host.work, asked) if item.name == "other"]
    assert (item.kind, item.bytes >= 10_000) == ("cache", True)
    assert (pruning.removed(host.work, item).fate, item.path.exists()) == ("goes", False)
    host.run("running", running=True)
    assert host.fates(asked)["inductor"] == ("stays", "run running may be using it")


def test_agents_that_nobody_is_go(agent: Agent, work: Path) -> None:
    old, living = work / "agent" / f"{'a' * 64}.pyz", work / "agent" / f"{'b' * 64}.pyz"
    for path in (old, living):
        path.write_bytes(b"agent")
    with subprocess.Popen(["sh", "-c", "read line", "supervise", str(living)], stdin=subprocess.PIPE) as process:
        assert {name for name, item in ask_all(agent).items() if item["fate"] == "goes"} == {old.name}
        assert living.exists()
        assert not old.exists()
        process.communicate()
    # and the one that answers still does, whatever it has to load for that
    assert {name for name, item in ask_all(agent).items() if item["fate"] == "goes"} == {living.name}
    assert agent.call("facts").result["releases"] == []


def test_a_run_that_somebody_begins_to_collect_meanwhile_stays(host: Host) -> None:
    path = host.run("a")
    (item,) = plan(host.work, NONE)
    (path / "pins").mkdir()
    _write(path / "pins/1.json", {"boot_id": boot_id(), "agent": _me(), "checkpoints": ["step-000004"]})
    assert (pruning.removed(host.work, item).fate, path.exists()) == ("stays", True)


def test_half_written_checkpoints_of_a_lost_run_go_though_it_stays(host: Host) -> None:
    for name, running in (("lost", False), ("live", True)):
        path = host.run(name, running=running)
        (path / "out/checkpoints/step-000004").mkdir()
        (path / "out/checkpoints/step-000008.part").mkdir()
        (path / "exit.json").unlink(missing_ok=True)
    (host.work.runs / "lost/trash").mkdir()
    everything = Limits(runs=9, releases=9, environments=9, prepared=9, collected=None)
    going = {item.path.relative_to(host.work.runs) for item in plan(host.work, everything) if item.fate == "goes"}
    assert going == {Path("lost/trash"), Path("lost/out/checkpoints/step-000008.part")}


def test_what_the_host_does_not_let_go_is_told_and_the_rest_goes(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, other = host.run("a"), host.run("b")
    remove = pruning.remove_tree

    def refuse(path: Path) -> None:
        if path.name == "a":
            raise PermissionError(1, "Operation not permitted")
        remove(path)

    monkeypatch.setattr(pruning, "remove_tree", refuse)
    done = {item.name: pruning.removed(host.work, item) for item in plan(host.work, NONE)}
    assert (done["a"].fate, done["b"].fate) == ("stuck", "goes")
    assert "Operation not permitted" in done["a"].why
    assert not other.exists()
    assert stuck.exists()


def ask_all(agent: Agent, **more: Any) -> dict[str, dict[str, Any]]:
    limits = {"keep_runs": 0, "keep_releases": 0, "keep_environments": 0, "keep_prepared": 0, "keep_assets": 0}
    items = agent.call("prune", **{**limits, "collected": None, **more}).result["items"]
    return {item["name"]: item for item in items}


def ask(agent: Agent, **more: Any) -> dict[str, dict[str, Any]]:
    """All but the agent that answers, with its bytecode and without."""
    items = ask_all(agent, **more)
    mine = [item for item in items.values() if item["kind"] == "agent"]
    assert {(item["fate"], item["why"]) for item in mine} == {("stays", "a process of it lives")}
    return {name: item for name, item in items.items() if item not in mine}


def test_over_the_wire(agent: Agent, work: Path) -> None:
    host = Host(work)
    old, current = host.release("old"), host.release("current")
    host.link("current", current)
    run, data = host.run("a", release=old), host.prepared("data")
    (run / "out/large").write_bytes(b"x" * 100_000)
    # an earlier prune was killed between its two steps
    leftover = work / "runs/.trash/gone"
    leftover.mkdir(parents=True)
    agent.call("facts")
    # its bytecode is kept after the first answer
    eventually(lambda: len(list((work / "agent").glob("*.pyz"))) == 2)
    before = sorted(work.rglob("*"))
    shown = ask(agent, dry_run=True)
    assert sorted(work.rglob("*")) == before
    assert {name: item["fate"] for name, item in shown.items()} == {
        "gone": "goes",
        "a": "goes",
        old: "goes",
        current: "stays",
        "data": "goes",
    }
    assert shown["a"]["bytes"] >= 100_000
    agent.call("lock", owner="ann@desk", command="prune")
    assert {name: item["fate"] for name, item in ask(agent).items()} == {
        name: item["fate"] for name, item in shown.items()
    }
    assert not run.exists()
    assert not data.exists()
    assert not leftover.exists()
    assert agent.call("runs").result["runs"] == []
    assert agent.call("facts").result["releases"] == [current]
    last = json.loads((work / "events.ndjson").read_text().splitlines()[-1])
    assert last["event"] == "prune"
    assert set(last["gone"]) == {"leftover gone", "run a", f"release {old}", "prepared data"}
    assert {name: item["fate"] for name, item in ask(agent).items()} == {current: "stays"}


def test_not_while_another_holds_the_host(agent: Agent, work: Path) -> None:
    run = Host(work).run("a")
    with Agent(work) as other:
        other.call("lock", owner="ann@desk", command="deploy")
        assert ask(agent, dry_run=True)["a"]["fate"] == "goes"
        with pytest.raises(AgentFailed) as caught:
            ask(agent)
        assert (caught.value.kind, caught.value.exit) == ("locked", 9)
    assert run.exists()
