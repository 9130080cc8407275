"""What a resumed run may change of the run that it goes on with."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_ops.config import ConfigError, load_playbook
from dflash_ops.config.playbook import Trainer
from dflash_ops.deploy.doctor import examine_packages
from dflash_ops.deploy.resuming import Point
from dflash_ops.errors import OpsError, TransportError

WORKLOAD = {"target": "/models/target", "mask_token": 7, "drafter_threads": 2, "buckets": [32]}
TRAINING = {"steps": 12, "prompts": "/data/p.jsonl", "betas": [0.5, 0.9]}


def point(**training: Any) -> Point:
    raw = {
        "playbook": "tiny",
        "module": "tiny_trainer",
        "max_age_s": 7200.0,
        "policy": {"grace_s": 20, "restarts": 2, "of_a_later_version": True},
        "settings": {"workload": WORKLOAD, "training": {**TRAINING, **training}},
    }
    return Point("one", "FAILED", "f" * 64, "/var/lib/dflash-ops/runs/one/out/checkpoints/step-000008", 8, raw)


def test_its_settings_are_the_runs_own_and_nothing_is_added() -> None:
    playbook = point().playbook(["learning_rate=0.01"], None)
    settings = playbook.settings("two", None, "/cache")
    # a default that the run did not name is its release's own
    assert settings["workload"] == WORKLOAD
    resumed = {"learning_rate": 0.01, "resume_from": "/var/lib/dflash-ops/runs/one/out/checkpoints/step-000008"}
    assert settings["training"] == {**TRAINING, **resumed}
    assert (playbook.name, playbook.trainer.module, playbook.run.canary_max_age_h) == ("tiny", "tiny_trainer", 2)


def test_the_weights_that_it_began_with_are_in_its_checkpoint() -> None:
    settings = point(init_from="/weights").playbook([], None).settings("two", None, "/cache")
    assert "init_from" not in settings["training"]


def test_only_what_is_known_to_be_the_bundled_trainer_is_asked_for_its_packages() -> None:
    bare = {"executable": "/usr/bin/python3", "packages": {}}
    assert examine_packages(bare, point().playbook([], None)) == []
    built = load_playbook("train")
    own = point().playbook([], built.model_copy(update={"trainer": Trainer(source="/src/mine", module="mine")}))
    assert own.trainer.module == "mine"
    assert examine_packages(bare, own) == []
    assert examine_packages(bare, point().playbook([], built)) != []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("drafter_threads=3", "keeps its workload"),
        ("workload.strategy=eager", "keeps its workload"),
        ("resume_from=/elsewhere", "last whole checkpoint"),
        ("init_from=/elsewhere", "last whole checkpoint"),
        ("name=other", "cannot be changed"),
        ("trainer.module=other", "cannot be changed"),
        ("stepz=3", "did you mean"),
        ("steps=many", "steps"),
    ],
)
def test_what_cannot_be_changed(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        point().playbook([text], None)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "lie",
    [{"settings": None}, {"settings": {"workload": {}, "training": 3}}, {"policy": []}, {"run": 7}, {"step": "8"}],
)
def test_an_answer_that_is_none_is_refused(lie: dict[str, Any]) -> None:
    texts = dict.fromkeys(("run", "state", "release", "module", "checkpoint"), "text")
    good = {**point().raw, **texts, "assets": {}, "step": 8}
    assert Point.of(good, "box").step == 8
    with pytest.raises(TransportError):
        Point.of({**good, **lie}, "box")


@pytest.mark.parametrize("sets", [["steps=8"], ["steps=3"]])
def test_nothing_is_left_to_do(sets: list[str]) -> None:
    with pytest.raises(OpsError) as caught:
        point().playbook(sets, None)
    assert "nothing is left to do" in caught.value.what
    assert caught.value.exit_code == 2
    assert point(steps=8).playbook(["steps=9"], None).training.steps == 9


def test_its_policy_is_the_runs_own_but_for_what_is_asked_now() -> None:
    own = {"grace_s": 20, "restarts": 2, "of_a_later_version": True}
    assert point().policy(point().playbook([], None)) == own
    changed = point().playbook(["run.restarts=5", "steps=100"], None)
    assert point().policy(changed) == {**own, "restarts": 5}
