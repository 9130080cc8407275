"""docs/trainer-contract.md as tests. A trainer's own module subclasses `TrainerContract` and gives a class-scoped
fixture `trainer`; its settings must train on two drafter threads within seconds."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .harness import Ended, Json, Trainer, files_below

STEPS = 6


@pytest.fixture(scope="class")
def checked(trainer: Trainer) -> Ended:
    return trainer.call("check", trainer.settings(), "check")


@pytest.fixture(scope="class")
def prepared(trainer: Trainer) -> Ended:
    return trainer.call("prepare", trainer.settings(), "prepared")


@pytest.fixture(scope="class")
def ready(trainer: Trainer, prepared: Ended) -> Json:
    """Settings of a run of STEPS steps."""
    assert prepared.code == 0, prepared.errors
    return {
        **trainer.settings(training={"steps": STEPS, "checkpoint_every": 3, "evaluate_every": 4}),
        "prepared": str(prepared.out),
    }


@pytest.fixture(scope="class")
def trained(trainer: Trainer, ready: Json) -> Ended:
    return trainer.call("run", {**ready, "run": "a-run"}, "run")


@pytest.fixture(scope="class")
def proven(trainer: Trainer, ready: Json) -> Ended:
    return trainer.call("canary", ready, "canary")


@pytest.fixture(scope="class", autouse=True)
def release_untouched(trainer: Trainer) -> Iterator[None]:
    package = trainer.root / trainer.module
    before = {name: body for name, body in files_below(package).items() if "__pycache__" not in name}
    yield
    after = {name: body for name, body in files_below(package).items() if "__pycache__" not in name}
    assert after == before, "a trainer may not write into its release"


def with_changes(settings: Json, *, cache: str | None = None, **tables: Json) -> Json:
    whole = {**settings, **{name: {**settings[name], **changes} for name, changes in tables.items()}}
    return whole if cache is None else {**whole, "cache": cache}


def checkpoint_step(folder: Path) -> int:
    """Verify a checkpoint against its manifest and return its step."""
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["v"], manifest["kind"]) == (1, "checkpoint")
    listed = {entry["path"]: entry for entry in manifest["files"]}
    found = files_below(folder)
    found.pop("manifest.json")
    assert listed.keys() == found.keys()
    for name, body in found.items():
        assert listed[name]["size"] == len(body)
        assert listed[name]["sha256"] == hashlib.sha256(body).hexdigest()
    assert listed["model.safetensors"]["role"] == "weights"
    assert listed["config.json"]["role"] == "config"
    assert {e["role"] for name, e in listed.items() if name.startswith("resume/")} == {"resume"}
    return manifest["step"]


def weights(folder: Path) -> tuple[Json, bytes]:
    """Return a safetensors file's header and data."""
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


@dataclass(frozen=True)
class Refusal:
    """Settings that `check` refuses: `where` and `hint` are in the last line of its standard error."""

    where: str
    changes: dict[str, Json]
    hint: str = ""


REFUSALS = [
    Refusal("drafter_thread", {"workload": {"drafter_thread": 2}}, "drafter_threads"),
    Refusal("step", {"training": {"step": 2}}, "steps"),
    Refusal("block_size", {"workload": {"block_size": 1}}),
    Refusal("strategy", {"workload": {"strategy": "fast"}}, "eager"),
    Refusal("mask_token", {"workload": {"mask_token": "<eos>"}}),
    Refusal("require_cuda", {"workload": {"require_cuda": True}}),
    Refusal("target", {"workload": {"target": "/no/such/target"}}),
    Refusal("drafter_devices", {"workload": {"drafter_devices": ["cpu"]}}),
    Refusal("prompts", {"training": {"prompts": None}}),
]
"""One of each kind: unknown keys, ranges, choices, tokens, the machine, paths, keys that belong together."""


def is_refused(trainer: Trainer, refusal: Refusal) -> None:
    """`check` exits 2, says why in the last line of standard error, and writes the problem down."""
    ended = trainer.call("check", with_changes(trainer.settings(), **refusal.changes), f"refused-{refusal.where}")
    assert ended.code == 2, ended.errors
    last = ended.errors.strip().splitlines()[-1]
    assert refusal.where in last and refusal.hint in last
    found = ended.read("check.json")
    assert (found["outcome"], found["warnings"]) == ("refused", [])
    told = [problem for problem in found["problems"] if refusal.where in json.dumps(problem)]
    assert told and all(told[0][part] for part in ("what", "where", "fix"))


class TrainerContract:
    """One test for each promise of the contract."""

    def test_check_accepts_good_settings(self, checked: Ended) -> None:
        assert checked.code == 0, checked.errors
        found = checked.read("check.json")
        assert (found["contract"], found["outcome"], found["problems"], found["warnings"]) == (1, "ok", [], [])
        assert int(found["prepare"]["key"], 16) and found["prepare"]["why"]
        assert all({"device", "uuid", "name", "memory_bytes"} <= set(d) for d in found["devices"])

    def test_the_prepare_key_follows_what_the_data_depends_on(self, trainer: Trainer, checked: Ended) -> None:
        key = checked.read("check.json")["prepare"]["key"]
        same = trainer.call("check", trainer.settings(training={"learning_rate": 0.123}), "check-same")
        assert same.read("check.json")["prepare"]["key"] == key
        other = trainer.call("check", trainer.settings(training={"prompt_count": 3}), "check-other")
        assert other.read("check.json")["prepare"]["key"] != key

    @pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.where)
    def test_check_refuses_and_names_the_place(self, trainer: Trainer, refusal: Refusal) -> None:
        is_refused(trainer, refusal)

    def test_prepare_leaves_a_whole_folder(self, prepared: Ended) -> None:
        assert prepared.code == 0, prepared.errors
        assert isinstance(prepared.read("prepare.json"), dict)
        assert not [name for name in files_below(prepared.out) if name.endswith(".part")]

    def test_prepare_goes_on_in_a_folder_that_a_killed_one_left(self, trainer: Trainer, prepared: Ended) -> None:
        left = trainer.work / "prepared-half"
        shutil.copytree(prepared.out, left)
        (left / "prepare.json").unlink()
        again = trainer.call("prepare", trainer.settings(), left.name)
        assert again.code == 0, again.errors
        made, whole = (files_below(each.out) for each in (again, prepared))
        assert isinstance(again.read("prepare.json"), dict)
        for files in (made, whole):
            # how long it took is no part of the data
            del files["prepare.json"]
        assert made == whole

    @pytest.mark.parametrize("verb", ["run", "canary"])
    def test_no_data_is_refused_in_words_and_in_a_file(self, trainer: Trainer, verb: str) -> None:
        ended = trainer.call(verb, trainer.settings(), f"unprepared-{verb}")
        assert ended.code == 2, ended.errors
        last = ended.errors.strip().splitlines()[-1]
        told = ended.read("refused.json")
        assert told["contract"] == 1
        assert "prepare" in last
        assert all(told[part] and told[part] in last for part in ("what", "where", "fix"))
        assert not (ended.out / "result.json").exists()
        assert not (ended.out / "evidence.json").exists()

    def test_canary_passes_and_says_what_it_did_not_check(self, proven: Ended, ready: Json) -> None:
        assert proven.code == 0, proven.errors
        found = proven.read("evidence.json")
        assert (found["contract"], found["outcome"]) == (1, "pass")
        assert found["summary"] and found["figures"]["seconds"] > 0
        for check in found["checks"]:
            assert set(check) == {"id", "worker", "outcome", "summary", "figures"}
            assert check["outcome"] in ("pass", "warn", "not_checked")
        workers = set(range(ready["workload"]["drafter_threads"]))
        for name in ("outputs", "loss", "gradients", "exchange", "parameters", "moved"):
            judged = [c for c in found["checks"] if c["id"] == name and c["outcome"] == "pass"]
            assert {c["worker"] for c in judged} == workers, name
        for name in ("gradients", "parameters"):
            for check in (c for c in found["checks"] if c["id"] == name):
                assert check["figures"]["worst"] <= check["figures"]["tolerance"]
        whole = {c["id"]: c["outcome"] for c in found["checks"] if c["worker"] is None}
        assert whole["negative_control"] == "pass"
        assert whole["rehearsal"] == "pass"
        assert whole["checkpoint"] == "pass"
        assert whole["sigterm"] == "pass"
        for name in ("cuda_graphs", "memory", "throughput", "health"):
            assert whole[name] == "not_checked", "there is no CUDA here"
        assert found["strategy"] == "eager"

    def test_canary_stopped_half_way_leaves_no_evidence(self, trainer: Trainer, ready: Json) -> None:
        endless = with_changes(ready, workload={"canary_steps": 5000})
        with trainer.started("canary", endless, "canary-stopped") as living:
            living.until(lambda: living.threads() > ready["workload"]["drafter_threads"])
            living.send(signal.SIGTERM)
            ended = living.end()
        assert ended.code != 0
        assert not (ended.out / "evidence.json").exists()

    def test_run_completes(self, trained: Ended) -> None:
        assert trained.code == 0, trained.errors
        result = trained.read("result.json")
        assert (result["contract"], result["outcome"], result["steps"]) == (1, "completed", STEPS)
        assert result["checkpoint"] == f"checkpoints/step-{STEPS:06d}"
        for when in ("before", "after"):
            assert set(result[when]) == {"loss", "first_slot_acceptance", "tau"}
        assert result["after"]["loss"] < result["before"]["loss"]

    def test_metrics_are_of_the_contract(self, trained: Ended, ready: Json) -> None:
        records = trained.records()
        assert all(r["v"] == 1 and r["time"] > 0 for r in records)
        assert [r["strategy"] for r in records if r["kind"] == "strategy"] == ["eager"]
        steps = [r for r in records if r["kind"] == "step"]
        assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
        keys = {"loss", "first_slot_accuracy", "learning_rate", "grad_norm", "samples", "workers", "queue_depth"}
        for record in steps:
            assert keys <= set(record)
            assert record["loss"] > 0 and 0 <= record["first_slot_accuracy"] <= 1
            assert record["samples"] == sum(len(w["samples"]) for w in record["workers"])
            assert all(w["wait_s"] >= 0 for w in record["workers"])
            assert [w["worker"] for w in record["workers"]] == list(range(ready["workload"]["drafter_threads"]))
        judged = [r for r in records if r["kind"] == "evaluation"]
        assert [(r["when"], r["step"]) for r in judged] == [("start", 0), ("step", 4), ("end", STEPS)]
        for record in judged:
            assert record["lossless"] is True and record["mismatches"] == []
            assert 1 <= record["tau"] <= ready["workload"]["block_size"]
            by_position = record["accepted_by_position"]
            assert len(by_position) == ready["workload"]["block_size"] - 1
            assert by_position[0] == pytest.approx(record["first_slot_acceptance"])
            assert by_position == sorted(by_position, reverse=True)

    def test_the_threads_train_on_different_samples(self, trained: Ended) -> None:
        for record in (r for r in trained.records() if r["kind"] == "step"):
            first, second = (set(worker["samples"]) for worker in record["workers"])
            assert first and second and not first & second

    def test_checkpoints_are_whole(self, trained: Ended) -> None:
        folders = sorted((trained.out / "checkpoints").iterdir())
        assert [folder.name for folder in folders] == ["step-000003", "step-000006"]
        assert [checkpoint_step(folder) for folder in folders] == [3, 6]
        told = [r["path"] for r in trained.records() if r["kind"] == "checkpoint"]
        assert told == [f"checkpoints/{folder.name}" for folder in folders]
        for folder in folders:
            header, data = weights(folder)
            header.pop("__metadata__", None)
            assert header and max(entry["data_offsets"][1] for entry in header.values()) == len(data)
            config = json.loads((folder / "config.json").read_text())
            assert config["block_size"]

    def test_resuming_equals_never_having_stopped(self, trainer: Trainer, ready: Json, trained: Ended) -> None:
        middle = trained.out / "checkpoints" / "step-000003"
        resumed = trainer.call("run", with_changes(ready, training={"resume_from": str(middle)}), "run-resumed")
        assert resumed.code == 0, resumed.errors
        last = f"checkpoints/step-{STEPS:06d}/model.safetensors"
        assert (resumed.out / last).read_bytes() == (trained.out / last).read_bytes()
        steps = {r["step"]: r["loss"] for r in resumed.records() if r["kind"] == "step"}
        straight = {r["step"]: r["loss"] for r in trained.records() if r["kind"] == "step"}
        assert steps == {step: straight[step] for step in (4, 5, 6)}

    def test_weights_of_another_run_are_a_start_with_all_else_fresh(
        self, trainer: Trainer, ready: Json, trained: Ended, tmp_path: Path
    ) -> None:
        whole = trained.out / trained.read("result.json")["checkpoint"]
        # as it comes home: without the optimiser's state
        brought = tmp_path / whole.name
        for name, body in files_below(whole).items():
            if not name.startswith("resume/"):
                (brought / name).parent.mkdir(parents=True, exist_ok=True)
                (brought / name).write_bytes(body)
        changed = with_changes(ready, training={"init_from": str(brought), "steps": 2})
        ended = trainer.call("run", changed, "run-from-weights")
        assert ended.code == 0, ended.errors
        assert [r["step"] for r in ended.records() if r["kind"] == "step"] == [1, 2]
        began, left = ended.read("result.json")["before"]["loss"], trained.read("result.json")
        # what was trained on, rounded to what a checkpoint holds
        assert began == pytest.approx(left["after"]["loss"], rel=1e-3)
        assert began != pytest.approx(left["before"]["loss"], rel=1e-3)
        weights_file = brought / "model.safetensors"
        weights_file.write_bytes(weights_file.read_bytes()[:-1] + b"\x7f")
        for more in ({"init_from": str(brought)}, {"init_from": str(whole), "resume_from": str(whole)}):
            refused = trainer.call("run", with_changes(ready, training=more), f"refused-{len(more)}")
            assert refused.code == 2
            assert "init_from" in refused.errors or str(brought) in refused.errors

    def test_a_killed_run_resumes_in_its_own_folder(self, trainer: Trainer, ready: Json, trained: Ended) -> None:
        endless = with_changes(ready, training={"steps": 10**6, "checkpoint_every": 2})
        with trainer.started("run", endless, "run-killed") as living:
            living.until(lambda: living.steps() >= 5)
            living.send(signal.SIGKILL)
            out = living.end().out
        whole = [f for f in sorted((out / "checkpoints").iterdir()) if not f.name.endswith(".part")]
        assert len(whole) >= 2
        step = checkpoint_step(whole[-1])
        more = {"steps": step + 2, "checkpoint_every": 10**6, "resume_from": str(whole[-1])}
        ended = trainer.call("run", with_changes(ready, training=more), "run-killed")
        assert ended.code == 0, ended.errors
        assert ended.read("result.json")["steps"] == step + 2
        assert all(isinstance(json.loads(line), dict) for line in _lines(out / "metrics.ndjson", torn=1))

    @pytest.mark.parametrize("damage", ["manifest", "weights"])
    def test_a_torn_checkpoint_is_not_resumed(
        self, trainer: Trainer, ready: Json, trained: Ended, tmp_path: Path, damage: str
    ) -> None:
        whole = trained.out / "checkpoints" / "step-000003"
        torn = tmp_path / "torn"
        for name, body in files_below(whole).items():
            (torn / name).parent.mkdir(parents=True, exist_ok=True)
            (torn / name).write_bytes(body)
        if damage == "manifest":
            (torn / "manifest.json").unlink()
        else:
            path = torn / "model.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
        changed = with_changes(ready, training={"resume_from": str(torn)})
        ended = trainer.call("run", changed, f"torn-{damage}")
        assert ended.code == 2
        assert str(torn) in ended.errors.strip().splitlines()[-1]

    def test_sigterm_writes_a_checkpoint_and_exits_20(self, trainer: Trainer, ready: Json) -> None:
        endless = with_changes(ready, training={"steps": 10**6, "checkpoint_every": 10**6})
        with trainer.started("run", endless, "run-stopped") as living:
            living.until(lambda: living.steps() >= 2)
            living.send(signal.SIGTERM)
            living.send(signal.SIGTERM)
            ended = living.end()
        assert ended.code == 20, ended.errors
        result = ended.read("result.json")
        assert result["outcome"] == "stopped"
        assert checkpoint_step(ended.out / result["checkpoint"]) == result["steps"] >= 2
        assert result["steps"] == max(r["step"] for r in ended.records() if r["kind"] == "step")

    def test_sigusr1_prints_every_stack_and_goes_on(self, trainer: Trainer, ready: Json) -> None:
        endless = with_changes(ready, training={"steps": 10**6, "checkpoint_every": 10**6})
        with trainer.started("run", endless, "run-asked") as living:
            living.until(lambda: living.steps() >= 1)
            living.send(signal.SIGUSR1)
            threads = 1 + ready["workload"]["drafter_threads"]
            living.until(lambda: living.errors.read_text().count("most recent call first") >= threads)
            seen = living.steps()
            living.until(lambda: living.steps() > seen)

    def test_evaluate_says_what_the_run_said(self, trainer: Trainer, ready: Json, trained: Ended) -> None:
        folder = trained.out / trained.read("result.json")["checkpoint"]
        ended = trainer.call("evaluate", ready, "evaluate", "--checkpoint", str(folder))
        assert ended.code == 0, ended.errors
        found, after = ended.read("evaluation.json"), trained.read("result.json")["after"]
        assert found["tau"] == pytest.approx(after["tau"])
        assert found["loss"] == pytest.approx(after["loss"], rel=1e-5)
        assert found["lossless"] is True


class TuningContract:
    """The promises about `tune` and the strategy `auto`."""

    def test_auto_without_a_table_asks_for_one_and_runs_nothing(self, trainer: Trainer, ready: Json) -> None:
        auto = with_changes(ready, workload={"strategy": "auto"}, cache=str(trainer.work / "untuned"))
        asked = trainer.call("check", auto, "check-untuned")
        assert asked.code == 0, asked.errors
        assert int(asked.read("check.json")["tune"]["key"], 16) and asked.read("check.json")["tune"]["why"]
        for verb in ("canary", "run"):
            ended = trainer.call(verb, auto, f"{verb}-untuned")
            assert ended.code == 2, ended.errors
            last = ended.errors.strip().splitlines()[-1]
            assert "workload.strategy" in last and "tune" in last
            assert not (ended.out / "evidence.json").exists() and not (ended.out / "result.json").exists()

    def test_tune_keeps_a_table_and_auto_is_the_fastest_right_one(self, trainer: Trainer, ready: Json) -> None:
        asked = trainer.call("check", with_changes(ready, workload={"strategy": "auto"}), "check-before")
        ended = trainer.call("tune", ready, "tuned")
        assert ended.code == 0, ended.errors
        table = ended.read("tuning.json")
        assert (table["contract"], table["key"]) == (1, asked.read("check.json")["tune"]["key"])
        rows = {row["strategy"]: row for row in table["strategies"]}
        assert rows[table["fastest"]]["outcome"] == "right"
        for row in rows.values():
            assert set(row) == {
                *("strategy", "outcome", "why"),
                *("step_ms", "samples_per_s", "peak_bytes", "warm_up_s"),
            }
            assert row["outcome"] in ("right", "wrong", "failed", "not_available")
            assert (row["outcome"] == "right") == (row["why"] is None) == (row["step_ms"] is not None)
        kept = Path(ready["cache"]) / "tuning" / f"{table['key']}.json"
        assert json.loads(kept.read_text()) == table
        for name, value in table["shapes"].items():
            assert ready["workload"].get(name, value) == value

        other = {"learning_rate": 0.123}
        auto = with_changes(ready, workload={"strategy": "auto", "canary_steps": 2}, training=other)
        assert trainer.call("check", auto, "check-tuned").read("check.json")["tune"] is None
        wider = with_changes(auto, workload={"drafter_threads": 3})
        assert trainer.call("check", wider, "check-wider").read("check.json")["tune"]["key"] != table["key"]
        proven = trainer.call("canary", auto, "canary-tuned")
        assert proven.code == 0, proven.errors
        found = proven.read("evidence.json")
        assert (found["strategy"], found["tuning"]) == (table["fastest"], table)

    def test_a_table_is_believed_only_where_it_names_a_strategy(self, trainer: Trainer, ready: Json) -> None:
        key = trainer.call("tune", ready, "tuned-again").read("tuning.json")["key"]
        auto = with_changes(ready, workload={"strategy": "auto"})
        kept = Path(ready["cache"]) / "tuning" / f"{key}.json"
        for broken in ('{"fastest": "no-such-strategy"}', '{"fastest":', "[]"):
            kept.write_text(broken)
            assert trainer.call("check", auto, "check-broken").read("check.json")["tune"]["key"] == key


def _lines(path: Path, torn: int) -> list[str]:
    """Return the whole lines; a kill may tear at most `torn` of them."""
    good, bad = [], 0
    for line in path.read_text().splitlines():
        try:
            json.loads(line)
            good.append(line)
        except ValueError:
            bad += 1
    assert bad <= torn
    return good
