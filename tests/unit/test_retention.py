"""Which checkpoints stay: the last, the best by what the run's own metrics tell, and what somebody needs now."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dflash_ops.agent.policy import Policy
from dflash_ops.agent.processes import ProcessId, boot_id
from dflash_ops.agent.retention import Retention
from dflash_ops.agent.runs import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return begun(tmp_path, "one")


def begun(root: Path, name: str, resume_from: Path | None = None) -> RunFolder:
    """A run that is going on: this process is its supervisor."""
    folder = RunFolder(root / "runs" / name)
    (folder.out / "checkpoints").mkdir(parents=True)
    write(folder.path / "run.json", {"run": name, "started": 1.0})
    write(folder.path / "settings.json", {"training": {"resume_from": resume_from and str(resume_from)}})
    me = ProcessId.of(os.getpid())
    assert me
    write(folder.state_file, {"boot_id": boot_id(), "supervisor": me.to_json()})
    return folder


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def save(folder: RunFolder, *steps: int) -> None:
    for step in steps:
        path = folder.out / "checkpoints" / f"step-{step:06d}"
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"w")
        entry = {"path": "model.safetensors", "size": 1, "sha256": "0" * 64, "role": "weights"}
        write(path / "manifest.json", {"v": 1, "kind": "checkpoint", "step": step, "files": [entry]})


def record(folder: RunFolder, *records: dict[str, object]) -> None:
    with folder.metrics.open("a") as file:
        file.writelines(json.dumps({"v": 1, **one}) + "\n" for one in records)


def kept(folder: RunFolder) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder.out / "checkpoints").iterdir() if path.suffix == "")


def tend(folder: RunFolder, **policy: int | None) -> list[int]:
    Retention(folder, Policy(**policy)).tend()  # type: ignore[arg-type]
    return kept(folder)


def losses(**by_step: float) -> list[dict[str, object]]:
    return [{"kind": "step", "step": int(step[1:]), "loss": loss} for step, loss in by_step.items()]


def test_the_last_ones_stay(run: RunFolder) -> None:
    save(run, 1, 2, 3, 4, 5)
    assert tend(run, keep_last=2, keep_best=0) == [4, 5]
    assert not (run.path / "trash").exists()


def test_the_newest_that_is_known_to_be_finite_stays(run: RunFolder) -> None:
    save(run, 1, 2, 3, 4)
    retention = Retention(run, Policy(keep_last=1, keep_best=0))
    retention.good_step = 2
    retention.finish()
    assert kept(run) == [2, 4]
    # once the metrics say so of the newest, it is enough: nothing else is new
    retention.good_step = 4
    retention.finish()
    assert kept(run) == [4]


def test_all_stay_where_the_playbook_says_so(run: RunFolder) -> None:
    save(run, 1, 2, 3, 4, 5)
    assert tend(run, keep_last=None) == [1, 2, 3, 4, 5]


def test_the_newest_may_still_be_judged(run: RunFolder) -> None:
    save(run, 1, 2, 3, 4)
    # by the training loss it would be 3
    record(run, *losses(s1=4.0, s2=3.0, s3=1.0, s4=2.0))
    record(run, *({"kind": "evaluation", "step": step, "tau": tau} for step, tau in ((1, 2.0), (2, 2.5), (3, 1.5))))
    assert tend(run, keep_last=1, keep_best=1) == [2, 4]


def test_without_a_word_of_the_metrics_nothing_is_best(run: RunFolder) -> None:
    save(run, 1, 2, 3)
    assert tend(run, keep_last=1, keep_best=1) == [3]


def test_the_best_by_training_loss(run: RunFolder) -> None:
    save(run, 1, 2, 3, 4)
    record(run, *losses(s1=2.0, s2=0.5, s3=9.0, s4=9.0))
    # the mean of all up to the step: 2.0, 1.25, 3.8, 5.1
    assert tend(run, keep_last=1, keep_best=1) == [2, 4]


def test_held_out_figures_decide_where_every_checkpoint_has_them(run: RunFolder) -> None:
    save(run, 1, 2, 3)
    record(run, *losses(s1=1.0, s2=2.0, s3=3.0))
    record(run, *({"kind": "evaluation", "step": step, "tau": tau} for step, tau in ((1, 1.1), (2, 1.9), (3, 1.2))))
    assert tend(run, keep_last=1, keep_best=1) == [2, 3]


def test_figures_of_different_kinds_are_not_compared(run: RunFolder) -> None:
    save(run, 1, 2, 3)
    record(run, *losses(s1=1.0, s2=2.0, s3=3.0), {"kind": "evaluation", "step": 3, "tau": 9.0, "loss": 0.1})
    assert tend(run, keep_last=1, keep_best=1) == [1, 3]


def test_damaged_and_non_finite_records_count_for_nothing(run: RunFolder) -> None:
    save(run, 1, 2, 3)
    record(run, *losses(s1=1.0, s2=float("nan"), s3=5.0))
    with run.metrics.open("a") as file:
        file.write('{"kind": "step", "step": 3, "lo\n[]\n{"kind": "step", "step": 3, "loss": 0.0')
    assert tend(run, keep_last=1, keep_best=1) == [2, 3]


def test_the_best_stays_the_best_while_the_run_goes_on(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_ops.agent.retention._LOOK_S", 0)
    retention = Retention(run, Policy(keep_last=2, keep_best=1))
    for step in range(1, 9):
        save(run, step)
        record(run, *losses(**{f"s{step}": abs(step - 3.0)}))
        retention.tend()
    # means: 2, 1.5, 1, 1, 1.2, 1.5, 1.9, 2.3: of equal ones the later
    assert kept(run) == [4, 7, 8]


def test_a_pinned_checkpoint_stays_until_its_reader_is_gone(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_ops.agent.retention._LOOK_S", 0)
    save(run, 1, 2, 3)
    me = ProcessId.of(os.getpid())
    assert me
    pin = run.path / "pins/1.json"
    write(pin, {"boot_id": boot_id(), "agent": me.to_json(), "checkpoints": ["step-000001"]})
    retention = Retention(run, Policy(keep_last=1, keep_best=0))
    retention.tend()
    assert kept(run) == [1, 3]
    write(pin, {"boot_id": boot_id(), "agent": {"pid": me.pid, "start": me.start - 1}, "checkpoints": ["step-000001"]})
    retention.tend()
    assert kept(run) == [3]
    assert not pin.exists()


def test_what_a_living_run_was_begun_from_stays(run: RunFolder, tmp_path: Path) -> None:
    save(run, 1, 2, 3)
    child = begun(tmp_path, "child", run.out / "checkpoints/step-000001")
    assert tend(run, keep_last=1, keep_best=0) == [1, 3]
    write(child.exit_file, {"state": "SUCCEEDED"})
    assert tend(run, keep_last=1, keep_best=0) == [3]


@pytest.mark.parametrize("harm", ["part", "no manifest", "half"])
def test_what_is_not_whole_is_neither_touched_nor_counted(
    run: RunFolder, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_ops.agent.retention._LOOK_S", 0)
    save(run, 1, 2, 3)
    newest = run.out / "checkpoints/step-000003"
    if harm == "part":
        newest.rename(newest.with_suffix(".part"))
    elif harm == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        (newest / "model.safetensors").write_bytes(b"")
    before = {path.name for path in (run.out / "checkpoints").iterdir()}
    retention = Retention(run, Policy(keep_last=1, keep_best=0))
    retention.tend()
    assert {path.name for path in (run.out / "checkpoints").iterdir()} == before - {"step-000001"}
    retention.finish()
    left = {path.name for path in (run.out / "checkpoints").iterdir()}
    assert left == before - {"step-000001", "step-000003.part"}


def test_what_a_killed_supervisor_was_removing_is_removed(run: RunFolder) -> None:
    save(run, 1, 2)
    (run.path / "trash").mkdir()
    (run.out / "checkpoints/step-000001").rename(run.path / "trash/step-000001")
    Retention(run, Policy()).finish()
    assert not (run.path / "trash").exists()
    assert kept(run) == [2]
