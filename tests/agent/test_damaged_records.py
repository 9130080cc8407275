"""A record that was damaged, by a disk or by a trainer, says nothing; it stops no question about the other runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_ops.agent.leases import leases
from dflash_ops.agent.processes import boot_id
from dflash_ops.agent.runs import RunFolder, all_runs, last_restart
from dflash_ops.agent.workdir import WorkDir


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    work = WorkDir.open(str(tmp_path))
    path = work.runs / "one"
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"started": 1, "devices": ["cpu"]}))
    return RunFolder(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", "[" * 100_000),
        ("state.json", json.dumps({"boot_id": boot_id(), "supervisor": {"pid": 1, "start": "x"}, "job": None})),
        ("state.json", json.dumps({"boot_id": boot_id(), "supervisor": {"pid": 1, "start": {}}, "job": 5})),
        ("next.json", '{"kind": "restart", "outcome": "started", "run": 5, "why": null, "due": null, "left": 1}'),
    ],
)
def test_a_damaged_record_is_none(folder: RunFolder, name: str, text: str) -> None:
    (folder.path / name).write_text(text)
    work = WorkDir(folder.root)
    (found,) = all_runs(work)
    assert found.summary()["state"] == "LOST"
    assert leases(work) == []
    assert last_restart(work, found) == found
