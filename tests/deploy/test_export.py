"""`dflash-ops export` before any trainer is asked: which checkpoint, and what is refused."""

from __future__ import annotations

import json

import pytest

from dflash_ops.deploy.exporting import find_source
from dflash_ops.errors import OpsError
from tests.commands import Desk

OLD, NEW, BARE = "20261128-090000-train-0001", "20261129-090000-train-0002", "20261130-090000-train-0003"


@pytest.fixture
def runs(desk: Desk):
    """Two runs with checkpoints, one of them damaged or half brought home, and a later run without any."""
    for run, steps in ((OLD, (80,)), (NEW, (100, 20)), (BARE, ())):
        folder = desk.runs / run
        folder.mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps({"contract": 1, "workload": {"target": run}}))
        for step in steps:
            (folder / f"checkpoints/step-{step:06d}").mkdir(parents=True)
            (folder / f"checkpoints/step-{step:06d}/manifest.json").write_text("{}")
    for name in ("step-000300", "step-000200.damaged-1"):
        (desk.runs / NEW / "checkpoints" / name).mkdir()
    (desk.runs / NEW / "checkpoints/step-000200.damaged-1/manifest.json").write_text("{}")
    return desk.runs


@pytest.mark.parametrize(
    ("run", "step", "found"),
    [(None, None, (NEW, 100)), (None, 20, (NEW, 20)), (OLD, None, (OLD, 80)), (NEW, 100, (NEW, 100))],
)
def test_the_newest_complete_checkpoint_of_the_latest_run_or_what_is_named(runs, run, step, found):
    source = find_source(runs, run, step)
    assert (source.run, source.checkpoint) == (found[0], runs / found[0] / f"checkpoints/step-{found[1]:06d}")
    assert source.settings["workload"] == {"target": found[0]}


@pytest.mark.parametrize(
    ("run", "step", "message", "where"),
    [
        (None, 80, "no checkpoint of step 80: 20, 100 are here", NEW),
        (NEW, 300, "no checkpoint of step 300", NEW),
        (BARE, None, "no complete checkpoint", BARE),
        ("20261101-090000-train-0009", None, "no complete checkpoint", "train-0009"),
        ("../elsewhere", None, "no name of a run", "runs"),
    ],
)
def test_what_is_not_here_is_told_with_what_is(runs, run, step, message, where):
    with pytest.raises(OpsError, match=message) as refused:
        find_source(runs, run, step)
    assert refused.value.exit_code == 2
    assert where in refused.value.where
    assert refused.value.fix


def test_a_desk_without_runs_and_settings_that_cannot_be_read_end_with_exit_code_2(desk, runs):
    (runs / NEW / "settings.json").write_text("{")
    ended = desk.run("export", "--out", "served", host=False)
    assert ended.code == 2
    assert "settings.json" in ended.error["where"]
    empty = desk.run("export", "--out", "served", "--runs", "none", host=False)
    assert empty.code == 2
    assert "no complete checkpoint" in empty.error["what"]
    assert not (desk.folder / "served").exists()
