"""The run itself: it learns, its threads train on different samples, replicas stay equal, and failures end it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.tiny_target import build_tiny_target, write_prompts
from trainer import train_dflash_pipeline as pipeline
from trainer import workers as workers_module
from trainer.checkpoint import load_checkpoint, load_resume
from trainer.errors import Diverged, InputError, WorkerFailed
from trainer.judge import judge_checkpoint
from trainer.placement import place
from trainer.prepare import prepare
from trainer.queues import OrderedQueue
from trainer.replica import DrafterReplica
from trainer.settings import settings_from_json
from trainer.step import DrafterStep
from trainer.train_dflash_pipeline import run
from trainer.workers import BatchMaker

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.ndjson").read_text().splitlines()]


def steps(out: Path) -> list[dict[str, Any]]:
    return [each for each in metrics(out) if each["kind"] == "step"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def test_it_learns_its_target(tmp_path: Path, out: Path, make_settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafter threads overfit a tiny target: the loss falls far and speculative decoding gets faster."""
    replicas: list[DrafterReplica] = []
    build = pipeline.build_replica
    monkeypatch.setattr(pipeline, "build_replica", lambda *given: replicas.append(build(*given)) or replicas[-1])
    target = build_tiny_target(tmp_path / "target", seed=11)
    # every prompt comes twice, so the held-out ones are known ones: overfitting is what is asked for
    prompts = write_prompts(tmp_path / "prompts.jsonl", 6)
    prompts.write_text(prompts.read_text() * 2)
    settings = make_settings(
        target=str(target), prompts=str(prompts), steps=200, learning_rate=5e-3, anchors=12, evaluation_prompts=4,
        evaluation_tokens=16, checkpoint_every=1000,
    )  # fmt: skip
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    prepare(settings_from_json(settings), prepared)
    result = run(settings_from_json(settings | {"prepared": str(prepared)}), out)
    assert result.outcome == "completed" and result.steps == 200
    before, after = result.before, result.after
    assert before is not None and after is not None
    assert before.loss is not None and after.loss is not None
    assert before.decoding.tau < 1.5
    assert after.decoding.tau > 2
    assert after.loss < before.loss / 3
    assert before.decoding.lossless and after.decoding.lossless
    found = steps(out)
    assert [each["step"] for each in found] == list(range(1, 201))
    assert all(each["workers"][0]["samples"] != each["workers"][1]["samples"] for each in found)
    assert all(each["samples"] == 2 for each in found)
    assert sum(each["loss"] for each in found[-20:]) < sum(each["loss"] for each in found[:20]) / 3
    assert len(replicas) == 2
    one, two = (each.drafter.state_dict() for each in replicas)
    assert all(torch.equal(one[name], two[name]) for name in one), "replicas differ"
    _, saved = load_checkpoint(result.checkpoint)
    assert all(torch.equal(saved[name], one[name]) for name in one)
    written = json.loads((out / "result.json").read_text())
    assert written["after"]["tau"] == after.decoding.tau and written["checkpoint"] == "checkpoints/step-000200"


def test_what_a_run_writes(out: Path, make_settings: Any, prepared_folder: Path) -> None:
    settings = settings_from_json(make_settings(prepared=str(prepared_folder)))
    run(settings, out)
    kinds = [(each["kind"], each["step"]) for each in metrics(out)]
    assert kinds == [
        ("strategy", 0), ("evaluation", 0), ("step", 1), ("step", 2), ("checkpoint", 2), ("step", 3), ("step", 4),
        ("checkpoint", 4), ("evaluation", 4),
    ]  # fmt: skip
    assert {each["v"] for each in metrics(out)} == {1}
    assert sorted(each.name for each in (out / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    at_work = [json.loads(line) for line in (out / "at_work.ndjson").read_text().splitlines()]
    last = steps(out)[-1]["workers"]
    assert at_work == [{"worker": each["worker"], "step": 4, "samples": each["samples"]} for each in last]
    for name in ("config.json", "model.safetensors", "manifest.json", "resume/state.json"):
        assert (out / "checkpoints" / "step-000004" / name).is_file()
    (start, end) = (each for each in metrics(out) if each["kind"] == "evaluation")
    assert (start["when"], end["when"]) == ("start", "end")
    assert 1 <= end["tau"] <= 4 and len(end["accepted_by_position"]) == 3 and end["lossless"] is True


@pytest.mark.parametrize(
    "overrides",
    [
        {"drafter_threads": 3, "target_workers": 2, "batch_size": 3, "buckets": [20, 32]},
        {"drafter_threads": 2, "target_workers": 2, "accumulation": 2, "batch_size": 2},
        {"target_workers": 2, "target_gpus": 2, "target_forward": "eager"},
        {"drafter_threads": 1, "dtype": "bfloat16", "target_dtype": "bfloat16"},
    ],
)
def test_a_run_repeats_bit_for_bit(
    tmp_path: Path, make_settings: Any, prepared_folder: Path, overrides: dict[str, Any]
) -> None:
    settings = settings_from_json(make_settings(prepared=str(prepared_folder), **overrides))
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        result = run(settings, tmp_path / name, limit_steps=2, evaluate=False)
        found.append(load_checkpoint(result.checkpoint)[1])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    samples = [each["samples"] for each in steps(tmp_path / "one")[0]["workers"]]
    rows = [row for each in samples for row in each]
    assert len(rows) == len(set(rows)), "two workers trained on the same row"


@pytest.mark.parametrize("loss_type", ["dflash", "dpace"])
def test_accumulation_and_workers_see_the_same_union(
    tmp_path: Path, make_settings: Any, prepared_folder: Path, loss_type: str
) -> None:
    """Two workers, or one that accumulates twice: the same rows make the same step (but for rounding)."""
    weights = []
    for name, shape in (("w", {"drafter_threads": 2}), ("a", {"drafter_threads": 1, "accumulation": 2})):
        # as many anchor slots as there are positions: no sampling is left in it
        settings = settings_from_json(
            make_settings(prepared=str(prepared_folder), anchors=32, loss_type=loss_type, **shape)
        )
        (tmp_path / name).mkdir()
        result = run(settings, tmp_path / name, limit_steps=2, evaluate=False)
        weights.append(load_checkpoint(result.checkpoint)[1])
    for name, one in weights[0].items():
        torch.testing.assert_close(one, weights[1][name], rtol=1e-3, atol=1e-4)


def test_longest_rows_first(out: Path, make_settings: Any, tmp_path: Path) -> None:
    import datasets

    lengths = [6, 12, 9, 30, 7, 28]
    datasets.Dataset.from_dict(
        {"input_ids": [[9] * size for size in lengths], "loss_mask": [[1] * size for size in lengths]}
    ).save_to_disk(str(tmp_path / "data"))
    settings = make_settings(data=str(tmp_path / "data"), prompts=None, evaluation_prompts=0)
    result = run(settings_from_json(settings), out, limit_steps=1, longest_first=True)
    assert (result.steps, result.before, result.after) == (1, None, None)
    assert [each["samples"] for each in steps(out)[0]["workers"]] == [[3], [5]]


def test_a_worker_s_exception_ends_the_run_under_its_name(
    out: Path, make_settings: Any, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    train = workers_module.DrafterWorker._train

    def broken(self: Any, step: int, replica: Any) -> bool:
        if self.name == "drafter-1" and step == 1:
            raise ArithmeticError("broken on purpose")
        return train(self, step, replica)

    monkeypatch.setattr(workers_module.DrafterWorker, "_train", broken)
    with pytest.raises(WorkerFailed, match="drafter-1 failed: ArithmeticError: broken on purpose"):
        run(settings_from_json(make_settings(prepared=str(prepared_folder))), out, evaluate=False)
    error = capsys.readouterr().err
    assert "drafter-1 failed:\nTraceback" in error and "ArithmeticError: broken on purpose" in error
    assert not (out / "result.json").exists()
    # the failure may overtake the other worker's report of the step before
    assert [each["step"] for each in steps(out)] in ([1], [])


def test_a_target_worker_s_exception_ends_the_run(
    out: Path, make_settings: Any, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_given: Any) -> Any:
        raise OSError("no features today")

    monkeypatch.setattr(workers_module.BatchMaker, "make", broken)
    with pytest.raises(WorkerFailed, match="target-0 failed: OSError"):
        run(settings_from_json(make_settings(prepared=str(prepared_folder))), out, evaluate=False)


def test_a_loss_that_is_not_finite_ends_the_run(
    out: Path, make_settings: Any, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = workers_module.BatchMaker.make

    def poisoned(self: Any, assignment: Any, *given: Any) -> Any:
        batch = make(self, assignment, *given)
        if assignment.step == 1:
            batch.features[0, 0, 0] = float("nan")
        return batch

    monkeypatch.setattr(workers_module.BatchMaker, "make", poisoned)
    with pytest.raises(WorkerFailed, match="step 2: loss nan") as failed:
        run(settings_from_json(make_settings(prepared=str(prepared_folder))), out, evaluate=False)
    assert isinstance(failed.value.__cause__, Diverged)


@pytest.mark.parametrize("overrides", [{}, {"drafter_threads": 1, "dtype": "bfloat16", "strategy": "eager"}])
def test_judged_while_it_trains(
    tmp_path: Path, make_settings: Any, prepared_folder: Path, overrides: dict[str, Any]
) -> None:
    """What `evaluate` says of the checkpoint of that step, and the training is bit for bit the same without it."""
    found = {}
    for name, every in (("without", None), ("with", 1)):
        given = make_settings(prepared=str(prepared_folder), evaluate_every=every, steps=5, **overrides)
        (tmp_path / name).mkdir()
        settings = settings_from_json(given)
        found[name] = run(settings, tmp_path / name)
        judged = [each for each in metrics(tmp_path / name) if each["kind"] == "evaluation"]
        between = [("step", step) for step in range(1, 5)] if every else []
        assert [(each["when"], each["step"]) for each in judged] == [("start", 0), *between, ("end", 5)]
    ends = [each.checkpoint for each in found.values()]
    for load in (lambda path: load_checkpoint(path)[1], lambda path: load_resume(path).tensors):
        one, two = map(load, ends)
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    (tmp_path / "judged").mkdir()
    judge_checkpoint(settings, ends[1].parent / "step-000002", tmp_path / "judged")
    alone = json.loads((tmp_path / "judged" / "evaluation.json").read_text())
    for key in ("loss", "tau", "accepted_by_position", "lossless"):
        assert judged[2][key] == alone[key]


def test_a_failed_evaluation_ends_the_run(
    out: Path, make_settings: Any, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = pipeline.judge

    def broken(parts: Any, weights: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no figures today")
        return judge(parts, weights)

    monkeypatch.setattr(pipeline, "judge", broken)
    # the drafters wait for the evaluation before, and are let go
    settings = make_settings(prepared=str(prepared_folder), evaluate_every=1, steps=200, checkpoint_every=1000)
    with pytest.raises(WorkerFailed, match="evaluation failed: OSError: no figures today"):
        run(settings_from_json(settings), out)


def test_step_records_tell_who_waits(
    out: Path, make_settings: Any, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(owner: type, name: str) -> None:
        whole = getattr(owner, name)

        def slow(*given: Any, **named: Any) -> Any:
            time.sleep(0.01)
            return whole(*given, **named)

        monkeypatch.setattr(owner, name, slow)

    for owner, name in ((OrderedQueue, "get"), (OrderedQueue, "put"), (DrafterStep, "update"), (BatchMaker, "make")):
        slower(owner, name)
    run(settings_from_json(make_settings(prepared=str(prepared_folder))), out, evaluate=False)
    found = [each["pipeline"] for each in steps(out)]
    for record in found:
        assert record["samples_per_s"] * record["seconds"] == pytest.approx(2, rel=0.05)
    # 8 batches of 32 tokens; what is made ahead of its step is told before it
    tokens = sum(each["target_tokens_per_s"] * each["seconds"] for each in found)
    assert tokens == pytest.approx(8 * 32, rel=0.05)
    for key in ("drafter_wait", "target_wait", "drafter_busy", "target_busy"):
        # at least 4 sleeps of a worker of that side, of which the last may be told of too late
        assert sum(each[key] * each["seconds"] for each in found) > 0.02, key
        assert all(0 <= each[key] <= 1 for each in found)


def test_run_without_prepared_data_is_refused(out: Path, make_settings: Any) -> None:
    with pytest.raises(InputError, match="run prepare first"):
        run(settings_from_json(make_settings()), out)


def test_placement() -> None:
    base = {"contract": 1, "training": {"steps": 1}, "cache": "c"}

    def placed(cuda: int, **work: Any) -> tuple[list[str], list[str]]:
        settings = settings_from_json(base | {"workload": {"target": "t", "mask_token": "m", **work}})
        found = place(settings.workload, cuda)
        return [str(each) for each in found.drafters], [str(each) for each in found.targets]

    assert placed(0, require_cuda=False, drafter_threads=2) == (["cpu", "cpu"], ["cpu"])
    assert placed(1, drafter_threads=2) == (["cuda:0", "cuda:0"], ["cuda:0"])
    assert placed(4, drafter_threads=3) == (["cuda:0", "cuda:1", "cuda:2"], ["cuda:3"])
    assert placed(2, target_devices=["cuda:0"]) == (["cuda:0"], ["cuda:0"])
    with pytest.raises(InputError, match="cuda:0 to cuda:1"):
        placed(2, drafter_devices=["cuda:2"])
    wide = {"target_gpus": 2, "target_forward": "eager"}
    assert placed(4, drafter_threads=2, **wide) == (["cuda:0", "cuda:1"], ["cuda:2"])
    assert placed(4, target_workers=3, **wide)[1] == ["cuda:2", "cuda:0", "cuda:2"]
    assert placed(4, target_devices=["cuda:1", "cuda:3"], **wide)[1] == ["cuda:1"]
    for devices, words in (
        (["cuda:1", "cuda:1"], "names a GPU twice"),
        (["cuda:1"], "1 devices for 2 threads"),
        (["cuda:1", "cuda:2", "cuda:1", "cuda:3"], "begin on the same GPU"),
    ):
        with pytest.raises(InputError, match=words):
            placed(4, target_devices=devices, target_workers=(len(devices) + 1) // 2, **wide)
    with pytest.raises(InputError, match="at most 1"):
        placed(1, **wide)
    with pytest.raises(InputError, match="target_forward: eager"):
        placed(4, target_gpus=2)
    with pytest.raises(InputError, match="require_cuda: false"):
        placed(0)


def command(verb: str, settings: dict[str, Any], folder: Path, *more: str) -> list[str]:
    file = folder / f"{verb}.json"
    file.write_text(json.dumps(settings))
    return [sys.executable, "-m", "trainer", verb, "--settings", str(file), "--out", str(folder / verb), *more]


@pytest.mark.slow
def test_the_command_line_from_check_to_evaluate(make_settings: Any, tmp_path: Path) -> None:
    settings = make_settings()

    def call(verb: str, *more: str) -> Path:
        ended = subprocess.run(
            command(verb, settings, tmp_path, *more), capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return tmp_path / verb

    assert json.loads((call("check") / "check.json").read_text())["outcome"] == "ok"
    settings["prepared"] = str(call("prepare"))
    out = call("run")
    result = json.loads((out / "result.json").read_text())
    found = json.loads(
        (call("evaluate", "--checkpoint", str(out / result["checkpoint"])) / "evaluation.json").read_text()
    )
    assert {key: found[key] for key in ("loss", "tau", "first_slot_acceptance")} == result["after"]


@pytest.mark.slow
def test_sigterm_leaves_a_complete_checkpoint_and_sigusr1_shows_stacks(
    make_settings: Any, prepared_folder: Path, tmp_path: Path
) -> None:
    settings = make_settings(prepared=str(prepared_folder), steps=100000, checkpoint_every=100000, evaluation_prompts=0)
    process = subprocess.Popen(
        command("run", settings, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "step 3 " in line:
            break
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 20, error
    assert "Current thread" in error and "_train" in error
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["outcome"] == "stopped" and result["after"] is None
    assert result["steps"] == steps(tmp_path / "run")[-1]["step"]
    load_checkpoint(tmp_path / "run" / result["checkpoint"])
    kept = [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()]
    assert kept == [f"step-{result['steps']:06d}"]
