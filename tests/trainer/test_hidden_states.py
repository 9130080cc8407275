"""Hidden states on disk: written once, also over kills, and trained on as if the target had just computed them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.test_prepare import checked
from tests.trainer.test_resume import folder, same
from tests.trainer.tiny_target import build_tiny_target
from trainer import hidden_states_writer as writer
from trainer.canary import run_canary
from trainer.canary.gate import gate_settings
from trainer.checkpoint import load_checkpoint
from trainer.errors import InputError, WorkerFailed
from trainer.hidden_states import FOLDER, INDEX, HiddenStates
from trainer.judge import judge_checkpoint
from trainer.parts import load_parts
from trainer.prepare import prepare, prepare_key
from trainer.settings import Settings, settings_from_json
from trainer.target import Target
from trainer.train_dflash_pipeline import run
from trainer.workers import BatchMaker

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
JOURNAL = "hidden_states.ndjson"


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_SHARD_ROWS", 3)


@pytest.fixture
def offline(make_settings: Any, tmp_path: Path) -> Any:
    """Settings on hidden states that are prepared with the first settings asked for."""

    def make(**overrides: Any) -> Settings:
        out = tmp_path / "prepared"
        given = {"hidden_states": "offline", "steps": 6, "checkpoint_every": 3, **overrides}
        if not out.exists():
            prepare(settings_from_json(make_settings(**{**given, "hidden_states": "offline"})), folder(out))
        return settings_from_json(make_settings(**{"prepared": str(out), **given}))

    return make


def lines(out: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.ndjson").read_text().splitlines()]
    return [each for each in found if each["kind"] == kind]


def states_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / FOLDER).iterdir()}


def no_target(*_given: Any) -> Any:
    raise AssertionError("a target was loaded")


@pytest.mark.parametrize(
    "overrides",
    [
        {"target_layers": [0, 2, 4]},
        {"dtype": "bfloat16", "target_dtype": "bfloat16", "accumulation": 2, "target_workers": 2, "buckets": [20, 32]},
        {"dtype": "float32", "target_dtype": "bfloat16", "drafter_threads": 1},
    ],
)
def test_the_training_is_the_online_one_bit_for_bit_and_needs_no_target(
    tmp_path: Path, offline: Any, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = offline(**overrides)
    online = run(offline(**overrides, hidden_states="online"), folder(tmp_path / "online"), evaluate=False)
    monkeypatch.setattr(Target, "load", no_target)
    found = run(settings, folder(tmp_path / "offline"), evaluate=False)
    same(online.checkpoint, found.checkpoint)
    one, two = (lines(tmp_path / name, "step") for name in ("online", "offline"))
    told = ("step", "loss", "first_slot_accuracy", "grad_norm", "samples")
    assert [[each[key] for key in told] for each in one] == [[each[key] for key in told] for each in two]
    assert [[each["samples"] for each in step["workers"]] for step in one] == [
        [each["samples"] for each in step["workers"]] for step in two
    ]
    assert all(each["pipeline"]["target_tokens_per_s"] > 0 for each in two[:1])
    halfway = offline(**overrides, resume_from=str(found.checkpoint.parent / "step-000003"))
    rest = run(halfway, folder(tmp_path / "rest"), evaluate=False)
    same(online.checkpoint, rest.checkpoint)


def test_batches_of_several_rows_are_padded_as_online(tmp_path: Path, offline: Any) -> None:
    overrides = {"batch_size": 3, "buckets": [20, 32]}
    weights = []
    for name in ("offline", "online"):
        result = run(offline(**overrides, hidden_states=name), folder(tmp_path / name), evaluate=False)
        weights.append(load_checkpoint(result.checkpoint)[1])
    # other rows beside a row, which on some CPUs shows in the last bit
    for name, one in weights[0].items():
        torch.testing.assert_close(one, weights[1][name], rtol=1e-3, atol=1e-4)


def test_it_is_judged_as_online_and_the_target_is_there_for_that_alone(
    tmp_path: Path, offline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {}
    loaded: list[weakref.ref[Any]] = []
    load, make = Target.load, BatchMaker.make

    def told(*given: Any) -> Target:
        target = load(*given)
        loaded.append(weakref.ref(target.head_weight))
        return target

    alive: list[int] = []

    def counted(self: Any, *given: Any) -> Any:
        alive.append(sum(each() is not None for each in loaded))
        return make(self, *given)

    monkeypatch.setattr(Target, "load", told)
    monkeypatch.setattr(BatchMaker, "make", counted)
    for name, every, held in (("online", 2, 1), ("offline", 2, 1), ("offline", None, 0)):
        out = folder(tmp_path / f"{name}-{every}")
        settings = offline(hidden_states=name, evaluate_every=every)
        loaded.clear()
        alive.clear()
        result = run(settings, out)
        assert set(alive) == {held}, (name, every)
        figures[name, every] = [
            {key: each[key] for key in ("step", "when", "loss", "tau", "lossless")} for each in lines(out, "evaluation")
        ]
        judge_checkpoint(settings, result.checkpoint, folder(out / "judged"))
        assert json.loads((out / "judged" / "evaluation.json").read_text())["tau"] == figures[name, every][-1]["tau"]
    assert [each["step"] for each in figures["online", 2]] == [0, 2, 4, 6]
    assert figures["offline", 2] == figures["online", 2]
    assert figures["offline", None] == [figures["online", 2][0], figures["online", 2][-1]]


def test_the_gate_needs_no_target(offline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = offline(evaluate_every=1)
    monkeypatch.setattr(Target, "load", no_target)
    assert load_parts(gate_settings(settings)).targets == {}


def test_the_canary_rehearses_on_what_is_on_disk(tmp_path: Path, offline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = offline(draft_layers=1, rehearsal_steps=1, evaluation_prompts=1)
    read: list[tuple[int, ...]] = []
    features_of = HiddenStates.features_of

    def counted(self: HiddenStates, rows: Any) -> Any:
        read.append(rows.row_ids)
        return features_of(self, rows)

    monkeypatch.setattr(HiddenStates, "features_of", counted)
    assert run_canary(settings, folder(tmp_path / "canary")) == 0
    checks = json.loads((tmp_path / "canary" / "evidence.json").read_text())["checks"]
    assert {"rehearsal", "sigterm", "checkpoint", "rows"} <= {each["id"] for each in checks}
    # both drafters' rows of each step: the longest
    longest = load_parts(settings).data.longest_rows(2)
    assert set(read) == {(row,) for row in longest}


def test_what_is_on_disk_is_what_the_target_says(offline: Any, tiny_target: Path, tmp_path: Path) -> None:
    settings = offline(target_layers=[1, 3], buckets=[20, 32])
    parts = load_parts(settings)
    assert parts.states is not None
    index = json.loads((tmp_path / "prepared" / FOLDER / INDEX).read_text())
    shards = index["shards"]
    assert [each["first_row"] for each in shards] == [0, 3, 6, 9] and [len(each["lengths"]) for each in shards] == [
        3, 3, 3, 1,
    ]  # fmt: skip
    assert (index["target_layer_ids"], index["dtype"], index["rows"]) == ([1, 3], "float32", 10)
    told = json.loads((tmp_path / "prepared" / "prepare.json").read_text())["hidden_states"]
    assert told == {"rows": 10, "tokens": index["tokens"], "bytes": index["tokens"] * 2 * 32 * 4}
    target = Target.load(tiny_target, [torch.device("cpu")], torch.float32, (1, 3), tmp_path / "cache")
    for row in range(10):
        rows = parts.data.collate([row])
        found = parts.states.features_of(rows)
        assert torch.equal(found, target.features_of(rows))
        assert found.shape == (1, rows.input_ids.shape[1], 64) and not found[0, int(rows.lengths[0]) :].any()


def test_shards_are_bounded_by_bytes_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_SHARD_BYTES", 100)
    found = writer.shard_ranges([3, 4, 1, 30, 2, 0, 0, 0, 9], 10)
    assert found == [range(3), range(3, 4), range(4, 7), range(7, 9)]
    assert writer.shard_ranges([5], 10) == [range(1)]


def test_token_ids_of_ones_own_are_prepared_too(tmp_path: Path, make_settings: Any) -> None:
    import datasets

    sizes = [6, 40, 9, 1, 28, 14]
    datasets.Dataset.from_dict(
        {
            "input_ids": [[8 + (row * 5 + place) % 40 for place in range(size)] for row, size in enumerate(sizes)],
            "loss_mask": [[1] * size for size in sizes],
        }
    ).save_to_disk(str(tmp_path / "data"))
    given = {"data": str(tmp_path / "data"), "prompts": None, "evaluation_prompts": 1, "steps": 3}
    asked = checked(make_settings(**given, hidden_states="offline"), tmp_path / "check")["prepare"]
    assert checked(make_settings(**given), tmp_path / "check-online")["prepare"] is None
    # the held-out row is not written, the long one is cut at the bucket, and that without an anchor is
    assert f"hidden states of {6 + 32 + 9 + 1 + 28} tokens, {76 * 2 * 32 * 4} bytes" in asked["why"]
    out = folder(tmp_path / "prepared")
    prepare(settings_from_json(make_settings(**given, hidden_states="offline")), out)
    assert json.loads((out / "prepare.json").read_text())["key"] == asked["key"]
    assert sorted(each.name for each in out.iterdir()) == [".lock", FOLDER, "prepare.json"]
    ends = [
        run(
            settings_from_json(make_settings(**given, hidden_states=name, prepared=str(out))),
            folder(tmp_path / name),
            evaluate=False,
        ).checkpoint
        for name in ("offline", "online")
    ]
    same(*ends)


def test_the_key_follows_what_the_states_depend_on(make_settings: Any) -> None:
    def key(**overrides: Any) -> str:
        return prepare_key(settings_from_json(make_settings(**{"hidden_states": "offline", **overrides})))

    assert key() == key(steps=9, learning_rate=1e-4, drafter_threads=1, block_size=8, dtype="bfloat16", batch_size=2)
    assert key(anchor_eligibility="torchspec") == key() == key(target_workers=2)
    others = [key(target_layers=[0, 3]), key(buckets=[16, 32]), key(target_dtype="bfloat16"), key(prompt_count=11)]
    assert len({key(), key(hidden_states="online"), *others}) == 6


def test_written_over_any_interruption(tmp_path: Path, make_settings: Any) -> None:
    settings = settings_from_json(make_settings(hidden_states="offline"))
    whole = folder(tmp_path / "whole")
    (whole / JOURNAL).touch()
    # a second name for the file that prepare deletes at its end
    os.link(whole / JOURNAL, tmp_path / "journal")
    prepare(settings, whole)
    assert not (whole / JOURNAL).exists()
    journal = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    assert len(journal) == 5
    wanted = states_of(whole)

    def left(name: str, *, kept: int, tail: bytes = b"") -> Path:
        out = folder(tmp_path / name)
        shutil.copytree(whole / FOLDER, out / FOLDER)
        (out / FOLDER / INDEX).unlink()
        (out / JOURNAL).write_bytes(b"".join(journal[:kept]) + tail)
        return out

    def marked(out: Path, number: int) -> None:
        """A shard of the same size that nobody would write: gone if it is made again."""
        path = out / FOLDER / f"shard-{number:06d}.safetensors"
        path.write_bytes(b"#" * path.stat().st_size)

    cut = left("cut", kept=3, tail=journal[3][:20])
    for number in (2, 3):
        marked(cut, number)
    (cut / FOLDER / "shard-000002.part").write_bytes(b"half")
    lost = left("lost", kept=5)
    (lost / FOLDER / "shard-000000.safetensors").unlink()
    short = left("short", kept=5)
    (short / FOLDER / "shard-000001.safetensors").write_bytes(b"short")
    for out in (cut, lost, short, left("all", kept=5), left("none", kept=0)):
        prepare(settings, out)
        assert states_of(out) == wanted, out.name
        assert not (out / JOURNAL).exists()
    kept = left("kept", kept=3)
    marked(kept, 1)
    prepare(settings, kept)
    differ = {name for name, data in states_of(kept).items() if data != wanted[name]}
    # it was not made again, and a run finds out
    assert differ == {"shard-000001.safetensors"}
    with pytest.raises(WorkerFailed, match=r"damaged: row \d cannot be read"):
        run(
            settings_from_json(make_settings(hidden_states="offline", prepared=str(kept), steps=9)),
            folder(tmp_path / "run"),
            evaluate=False,
        )


def test_a_folder_of_other_states_is_not_gone_on_with(tmp_path: Path, make_settings: Any) -> None:
    out = folder(tmp_path / "out")
    (out / JOURNAL).write_text('{"key":"another"}\n')
    with pytest.raises(InputError, match="other settings"):
        prepare(settings_from_json(make_settings(hidden_states="offline")), out)
    assert (out / JOURNAL).read_text() == '{"key":"another"}\n' and not (out / "prepare.json").exists()


def test_no_room_is_refused_before_the_target_runs_and_answers_are_kept(
    tmp_path: Path, make_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])
    settings = settings_from_json(make_settings(hidden_states="offline", answer_batch=12))
    whole = folder(tmp_path / "whole")
    prepare(settings, whole)
    need = json.loads((whole / "prepare.json").read_text())["hidden_states"]["bytes"]
    out = folder(tmp_path / "out")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _path: usage(need * 9, need * 8 + 1, need - 1))
        with pytest.raises(InputError, match=r"need \d.* more, and .* are free") as refused:
            prepare(settings, out)
    assert "hidden_states: online" in refused.value.fix
    assert list((out / FOLDER).iterdir()) == [] and not (out / "prepare.json").exists()
    with monkeypatch.context() as room:
        room.setattr(shutil, "disk_usage", lambda _path: usage(need * 9, need * 8, need))
        room.setattr("trainer.prepare.TransformersEngine.answers", no_target)
        with pytest.raises(AssertionError):
            prepare(settings, folder(tmp_path / "fresh"))
        # nothing is asked of the target again: an engine is only asked for what is not there
        room.setattr(
            "trainer.prepare.TransformersEngine.answers", lambda _self, prompts, known: none_left(prompts, known)
        )
        prepare(settings, out)
    assert states_of(out) == states_of(whole)


def none_left(prompts: Any, known: Any) -> Any:
    assert all(row in known for row in prompts)
    return iter(())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"target_layers": [0, 3]}, r"target_layer_ids \(\[.*\] on disk, \[0, 3\] wanted\)"),
        ({"target_dtype": "bfloat16"}, r"dtype \(float32 on disk, bfloat16 wanted\)"),
        ({"buckets": [31, 32]}, r"buckets \(\[32\] on disk, \[31, 32\] wanted\)"),
        ({"buckets": [16]}, r"buckets .*, number of tokens .*, token ids of the rows"),
        ({"target": "other"}, "by their target model"),
    ],
)
def test_a_set_of_something_else_is_refused(
    tmp_path: Path, offline: Any, make_settings: Any, overrides: dict[str, Any], said: str
) -> None:
    offline()
    if "target" in overrides:
        overrides = {"target": str(build_tiny_target(tmp_path / "other", seed=4))}
    with pytest.raises(InputError, match=said) as refused:
        load_parts(offline(**overrides))
    assert refused.value.where == "settings.prepared" and "prepare the data again" in refused.value.fix
    given = make_settings(hidden_states="offline", prepared=str(tmp_path / "prepared"), **overrides)
    (problem,) = checked(given, tmp_path / "check")["problems"]
    assert problem["where"] == "settings.prepared"


def test_rows_that_changed_are_refused(tmp_path: Path, offline: Any, prepared_folder: Path) -> None:
    offline(answer_tokens=9)
    # other rows under the same set
    shutil.rmtree(tmp_path / "prepared" / "dataset")
    shutil.copytree(prepared_folder / "dataset", tmp_path / "prepared" / "dataset")
    with pytest.raises(InputError, match=r"number of tokens \(\d+ on disk, \d+ wanted\), token ids of the rows"):
        load_parts(offline())


def test_prepared_data_without_states(make_settings: Any, prepared_folder: Path) -> None:
    settings = settings_from_json(make_settings(hidden_states="offline", prepared=str(prepared_folder)))
    with pytest.raises(InputError, match="has no hidden states"):
        load_parts(settings)


def test_damage_is_found(tmp_path: Path, offline: Any) -> None:
    settings = offline()
    path = tmp_path / "prepared" / FOLDER / "shard-000001.safetensors"
    good = path.read_bytes()
    for bad, said in ((good[:-1], f"{len(good) - 1} bytes, not {len(good)}"), (None, "it is not there")):
        path.unlink()
        if bad is not None:
            path.write_bytes(bad)
        with pytest.raises(InputError, match=said) as refused:
            load_parts(settings)
        assert refused.value.fix == f"delete {tmp_path / 'prepared'} and prepare the data again"
        path.write_bytes(good)
    rows = load_parts(settings).data.collate([3])
    for place, said in ((len(good) - 5, "has not the digest"), (3, "cannot be read")):
        # of the same size: a bit of the last row's states, and the header's length
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x40]) + good[place + 1 :])
        states = load_parts(settings).states
        assert states is not None
        with pytest.raises(InputError, match=said):
            for row in (3, 4, 5):
                states.features_of(load_parts(settings).data.collate([row]))
    path.write_bytes(good)
    states = load_parts(settings).states
    assert states is not None and states.features_of(rows).any()


# runs the verb as the contract does, with small shards; in the third one the process is killed
STRUCK = """
import os, runpy, signal, sys
from trainer import hidden_states_writer as writer
writer._SHARD_ROWS = 3
if sys.argv.pop() == "struck":
    save, count = writer.save_file, 0
    def struck(states, path):
        global count
        save(states, path)
        count += 1
        if count == 3:
            os.truncate(path, 100)
            os.kill(os.getpid(), signal.SIGKILL)
    writer.save_file = struck
sys.argv[0] = "trainer"
runpy.run_module("trainer", run_name="__main__")
"""


@pytest.mark.slow
def test_killed_while_it_wrote_and_trained_on_all_the_same(tmp_path: Path, make_settings: Any) -> None:
    raw = make_settings(hidden_states="offline")
    whole, out = folder(tmp_path / "whole"), folder(tmp_path / "out")
    prepare(settings_from_json(raw), whole)
    (tmp_path / "settings.json").write_text(json.dumps(raw))
    verb = ["prepare", "--settings", str(tmp_path / "settings.json"), "--out", str(out)]
    killed = subprocess.run([sys.executable, "-c", STRUCK, *verb, "struck"], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (out / "prepare.json").exists() and not (out / FOLDER / INDEX).exists()
    assert (out / FOLDER / "shard-000002.part").stat().st_size == 100
    assert len((out / JOURNAL).read_bytes().splitlines()) == 3
    ended = subprocess.run(
        [sys.executable, "-c", STRUCK, *verb, "whole"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "6 of 10 rows' hidden states written: from an earlier prepare" in ended.stdout
    assert states_of(out) == states_of(whole)
    ends = [
        run(
            settings_from_json(make_settings(hidden_states=name, prepared=str(prepared))),
            folder(tmp_path / name),
            evaluate=False,
        ).checkpoint
        for name, prepared in (("offline", out), ("online", whole))
    ]
    same(*ends)
