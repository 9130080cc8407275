from __future__ import annotations

from typing import Any

import pytest

from dflash_ops.config import Host, load_playbook
from dflash_ops.deploy.doctor import (
    Level,
    examine_disk,
    examine_gpus,
    examine_holders,
    examine_host,
    examine_packages,
    examine_tools,
    examine_trainer,
    refuse_blockers,
)
from dflash_ops.errors import ExitCode, OpsError

FACTS: dict[str, Any] = {
    "hostname": "ct200",
    "kernel": "6.8",
    "cpus": 8,
    "memory_bytes": 64 << 30,
    "user": "root",
    "systemd": True,
    "workdir": "/var/lib/dflash-ops",
    "disk_free_bytes": 100 << 30,
    "inodes_free": 10**6,
    "time": 1000.0,
    "gpus": [],
    "driver": None,
}
GPU = {"index": 0, "uuid": "GPU-1", "name": "H200", "memory_bytes": 100, "memory_used_bytes": 1}
PYTHON = {"version": "3.12.3", "executable": "/opt/venv/bin/python", "packages": {"torch": "2.11.0"}}
HOST = Host(name="ct200", transport="local")


def levels(**changes: object) -> set[Level]:
    return {one.level for one in examine_host(HOST, {**FACTS, **changes}, PYTHON, now=1000.0)}


def test_a_good_host_has_nothing_to_mend() -> None:
    assert levels() == {Level.OK}


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({"disk_free_bytes": 100 << 20}, Level.BLOCKER),
        ({"disk_free_bytes": 2 << 30}, Level.WARNING),
        ({"inodes_free": 10}, Level.BLOCKER),
        ({"time": 1100.0}, Level.WARNING),
        ({"time": 900.0}, Level.WARNING),
    ],
)
def test_what_hurts_is_said(changes: dict[str, object], level: Level) -> None:
    assert level in levels(**changes)


def test_file_systems_without_inodes_are_no_blocker() -> None:
    assert levels(inodes_free=0) == {Level.OK}


def test_cuda() -> None:
    strict = load_playbook("train", sets=())
    cpu = load_playbook("quickstart", sets=())
    assert [one.level for one in examine_gpus(FACTS, strict)] == [Level.BLOCKER]
    assert [one.level for one in examine_gpus(FACTS, cpu)] == [Level.OK]
    free = {**FACTS, "gpus": [GPU], "driver": "580"}
    assert {one.level for one in examine_gpus(free, strict)} == {Level.OK}
    busy = {**FACTS, "gpus": [{**GPU, "memory_used_bytes": 40}], "driver": "580"}
    assert Level.WARNING in {one.level for one in examine_gpus(busy, strict)}


def test_a_trainers_problems_are_blockers_and_all_are_told() -> None:
    problem = {"what": "no such token", "where": "workload.mask_token", "fix": "use <mask>"}
    problems = [problem, problem, {"what": "no such file", "where": "workload.target", "fix": ""}]
    found = examine_trainer({"outcome": "refused", "problems": problems})
    with pytest.raises(OpsError) as refused:
        refuse_blockers(found, "ct200")
    assert refused.value.exit_code is ExitCode.BLOCKED
    assert "workload.mask_token: no such token (and 1 more)" in refused.value.what
    assert refused.value.fix == "use <mask>"


def test_a_trainers_warnings_are_shown_and_stop_nothing() -> None:
    warning = {"what": "the last layer", "where": "workload.target_layers", "fix": "leave it auto"}
    found = examine_trainer({"outcome": "ok", "problems": [], "warnings": [warning]})
    assert [one.level for one in found] == [Level.OK, Level.WARNING]
    assert (found[1].what, found[1].fix) == ("workload.target_layers: the last layer", "leave it auto")
    refuse_blockers(found, "ct200")


def test_a_refusal_without_reason_is_still_a_blocker() -> None:
    assert [one.level for one in examine_trainer({"outcome": "refused"})] == [Level.BLOCKER]


def test_missing_packages_of_the_bundled_trainer_are_named() -> None:
    playbook = load_playbook("quickstart", sets=())
    (blocker,) = examine_packages(PYTHON, playbook)
    assert blocker.level is Level.BLOCKER
    assert "transformers, datasets, safetensors" in blocker.what
    packages = {"torch": "2.11.0", "transformers": "5", "datasets": "5", "safetensors": "0.8"}
    (fine,) = examine_packages({**PYTHON, "packages": packages}, playbook)
    assert fine.level is Level.OK


def test_what_kernels_are_compiled_with() -> None:
    include = "/usr/include/python3.12"
    tools = {"c": "/usr/bin/gcc", "cxx": None, "headers": True, "include": include, "problem": None}

    def found(playbook: str = "train", **changes: object) -> list[tuple[Level, str, str]]:
        loaded = load_playbook("train", sets=[] if playbook == "train" else [playbook])
        return [
            (one.level, one.what, one.fix) for one in examine_tools({**PYTHON, "tools": {**tools, **changes}}, loaded)
        ]

    ((level, what, _),) = found()
    assert (level, "/usr/bin/gcc" in what) == (Level.OK, True)
    ((level, what, fix),) = found(c=None, headers=False)
    assert level is Level.WARNING
    assert "not a C compiler (CC, gcc or clang) and not Python's headers" in what
    assert "/usr/include/python3.12/Python.h" in what
    assert "apt install gcc libc6-dev python3.12-dev;" in fix
    # a compiler alone is not enough: Python.h needs the C library's headers
    ((level, what, fix),) = found(problem="stdlib.h: No such file or directory")
    assert (level, "stdlib.h" in what, "libc6-dev" in fix) == (Level.WARNING, True, True)
    ((level, what, fix),) = found("require_cuda=false")
    assert (level, "C++ compiler" in what, "g++" in fix) == (Level.WARNING, True, True)
    assert found("strategy=eager", c=None) == []


def test_who_holds_the_host_is_told() -> None:
    lock = {"owner": "ann@desk", "command": "deploy", "since": 0.0, "unheard_s": 2.0, "agent_lives": True}
    lease = {"kind": "run", "owner": "a", "devices": ["GPU-1"], "since": None, "pids": [], "playbook": None}
    gpu = {**GPU, "memory_used_bytes": 80 << 30, "memory_bytes": 100 << 30, "known": ["pid 7 vllm (80 GiB)"]}
    nobody = {"lock": None, "leases": [], "occupied": []}
    assert examine_holders(nobody) == []
    found = examine_holders(
        {
            "lock": lock,
            "leases": [
                {**lease, "state": "RUNNING"},
                {**lease, "state": "LOST", "pids": [7], "devices": None},
                {**lease, "state": "FAILED"},
            ],
            "occupied": [gpu],
        }
    )
    assert {one.level for one in found} == {Level.WARNING}
    for one, words in zip(
        found,
        (
            "ann@desk holds this host with `deploy` since 1970-01-01 00:00:00 UTC, last heard of 2 s ago",
            "run a has GPU-1",
            "run a has any device (its record is damaged); it is LOST, but its processes [7] live",
            "it is FAILED and about to be started again",
            "80.0 of 100.0 GiB; pid 7 vllm",
        ),
        strict=True,
    ):
        assert words in one.what


GIB = 1 << 30


def disk(free: int, size: int | None, *sets: str) -> tuple[Level, str]:
    playbook = load_playbook("quickstart", sets=("training.steps=1000", "training.checkpoint_every=100", *sets))
    footprint = {"checkpoint": None if size is None else {"bytes": size, "run": "before"}}
    (one,) = examine_disk(HOST, {**FACTS, "disk_free_bytes": free}, footprint, playbook)
    return one.level, one.what


def test_the_disk_that_a_run_will_need_is_projected_from_an_earlier_one() -> None:
    # three last, the best, and the next one before another goes
    assert disk(100 * GIB, 2 * GIB)[0] is Level.OK
    level, what = disk(9 * GIB, 2 * GIB)
    assert level is Level.BLOCKER
    assert (
        "5 checkpoints at once (3 last, 1 best, the next), 2.0 GiB each as those of run before: 10.0 GiB of 9.0 GiB"
        in what
    )
    assert disk(11 * GIB, 2 * GIB)[0] is Level.WARNING, "a log may take four more"
    assert disk(11 * GIB, 2 * GIB, "run.log_max_bytes=1048576")[0] is Level.OK


def test_assets_to_come_count_and_what_is_there_is_told() -> None:
    playbook = load_playbook("quickstart", sets=("training.steps=1000", "training.checkpoint_every=100"))
    footprint = {
        "checkpoint": {"bytes": GIB, "run": "before"},
        "caches": {"environments": GIB, "assets": 3 * GIB, "prepared": 0, "caches": GIB // 2},
    }
    facts = {**FACTS, "disk_free_bytes": 20 * GIB}
    fits, there = examine_disk(HOST, facts, footprint, playbook, coming=4 * GIB)
    assert fits.level is Level.OK
    assert "and 4.0 GiB of assets to come: 9.0 GiB of 20.0 GiB free" in fits.what
    assert "environments 1.0 GiB, assets 3.0 GiB, prepared data 0 B, compiled kernels and the like" in there.what
    full, _ = examine_disk(HOST, facts, footprint, playbook, coming=16 * GIB)
    assert full.level is Level.BLOCKER


def test_of_a_run_that_prepares_its_data_are_projected_and_no_checkpoints() -> None:
    playbook = load_playbook("quickstart", sets=("training.prompt_count=3000", "run.log_max_bytes=1048576"))
    # checkpoints that would not fit are none of its business
    footprint = {
        "checkpoint": {"bytes": 100 * GIB, "run": "before"},
        "prepared": {"path": "/w/cache/prepared/k", "bytes": 2 * GIB, "rows": 1000},
    }

    def told(free: int, footprint: dict[str, Any]) -> Any:
        (one,) = examine_disk(HOST, {**FACTS, "disk_free_bytes": free}, footprint, playbook, prepares=True)
        return one

    fits, full = told(7 * GIB, footprint), told(5 * GIB, footprint)
    assert (fits.level, full.level) == (Level.OK, Level.BLOCKER)
    assert "data of 3000 rows to prepare, as /w/cache/prepared/k (2.0 GiB for 1000)" in full.what
    assert "6.0 GiB of 5.0 GiB free" in full.what and "training.prompt_count" in full.fix
    unknown = told(GIB, {**footprint, "prepared": None})
    assert unknown.level is Level.OK and "prepared data of this target" in unknown.what


def test_a_run_that_keeps_all_its_checkpoints_needs_room_for_all() -> None:
    assert "10 checkpoints at once (all of the run's)" in disk(100 * GIB, GIB, "run.keep_last=null")[1]
    assert "2 checkpoints at once (all of the run's)" in disk(100 * GIB, GIB, "training.checkpoint_every=500")[1]


def test_without_an_earlier_run_nothing_is_guessed() -> None:
    assert disk(GIB, None)[0] is Level.OK
    assert "after its first run" in disk(GIB, None)[1]
