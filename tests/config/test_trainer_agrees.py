"""What a playbook may say is what the bundled trainer takes: no setting passes here to be refused on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ops.config import ConfigError, load_playbook
from dflash_ops.config.document import parse_document
from trainer.errors import InputError
from trainer.settings import RESERVED_VARIABLES, settings_from_json

SMALL = "version: 1\nworkload: {target: t, mask_token: m}\ntraining: {steps: 5}\n"
COUNTS = [
    *(
        "drafter_threads",
        "target_workers",
        "target_gpus",
        "anchors",
        "batch_size",
        "accumulation",
        "draft_layers",
        "draft_ffn",
    ),
    *("canary_steps", "rehearsal_steps", "canary_timeout_s", "steps", "prompt_count", "answer_tokens", "answer_batch"),
    *("evaluation_tokens", "evaluate_every", "checkpoint_every", "log_every"),
    "endpoint_concurrency",
]
GOOD = [
    *(f"{key}=1" for key in COUNTS if key != "prompt_count"),
    *("prompt_count=9", "evaluation_prompts=0", "evaluation_prompts=63", "block_size=2", "mask_token=0", "seed=0"),
    *("bad_prompts=0", "bad_prompts=5", "prompt_field=messages", "mask_token=auto"),
    *("gpus=[0, GPU-1f]", "buckets=[2, 3]", "target_layers=[0, 5]", "drafter_devices=[cpu]", "target_devices=[cuda:3]"),
    *("dtype=float32", "target_dtype=bfloat16", "strategy=eager", "strategy=default", "strategy=auto"),
    *("require_cuda=false", "throughput_check=false", "hidden_states=online", "hidden_states=offline"),
    *("sliding_window=16", "sliding_window=", "layer_types=auto", f"layer_types=[{', '.join(['full_attention'] * 5)}]"),
    *("anchor_eligibility=specforge", "anchor_eligibility=torchspec", "anchor_eligibility=speculators"),
    *("loss_type=dflash", "loss_type=dpace", "master_weights=float32", "master_weights=none"),
    *("linear_precision=dtype", "linear_precision=fp8"),
    *("sliding_window_origin=anchor", "sliding_window_non_causal=true"),
    *("learning_rate=1", "warmup_ratio=0", "weight_decay=1", "betas=[0, 0.999]", "clip=0.1", "decay_gamma=7"),
    *(
        "decay_gamma=",
        "draft_ffn=",
        "data=/d",
        "prompts=package:a/b",
        "resume_from=/c",
        "init_from=/c",
        "prompt_field=text",
    ),
]
BAD = [
    *(f"{key}=0" for key in COUNTS),
    *(
        "evaluation_prompts=-1",
        "bad_prompts=-1",
        "engine=vllm",
        "endpoint=http://127.0.0.1:8000/v1",
        "endpoint=ftp://a/v1",
        "endpoint=http://me:secret@a/v1",
        "evaluation_prompts=64",
        "prompt_count=8",
        "block_size=1",
        "mask_token=-1",
        "mask_token=''",
    ),
    *("seed=-1", "gpus=[]", "gpus=some", "gpus=[-1]", "buckets=[]", "buckets=[3, 2]", "buckets=[2, 2]", "buckets=[1]"),
    *(
        "target_layers=[5, 0]",
        "target_layers=[]",
        "drafter_devices=[cpu, cpu]",
        "drafter_devices=[gpu]",
        "target_devices=[]",
    ),
    *(
        "dtype=float16",
        "hidden_states=disk",
        "master_weights=bfloat16",
        "linear_precision=float8",
        "linear_precision=",
        "master_weights=",
        "hidden_states=",
        "strategy=max-autotune",
        "require_cuda=1",
        "steps=1.5",
        "steps=",
        "steps=true",
        "target=''",
    ),
    *("learning_rate=0", "learning_rate=2", "warmup_ratio=1", "weight_decay=-1", "betas=[0.9]", "betas=[0.9, 1]"),
    *(
        "clip=0",
        "decay_gamma=0",
        "loss_type=d-pace",
        "anchor_eligibility=SpecForge",
        "anchor_eligibility=",
        "prompt_field=",
        "data=''",
    ),
    *("sliding_window=15", "sliding_window=1", "sliding_window_origin=slot", "sliding_window_non_causal=1"),
    *("layer_types=[full_attention]", f"layer_types=[{', '.join(['sliding_attention'] * 5)}]", "layer_types=[]"),
    f"layer_types=[{', '.join(['full'] * 5)}]",
]


@pytest.mark.parametrize("name", ["quickstart", "train"])
def test_the_bundled_playbooks_are_taken(name: str) -> None:
    book = load_playbook(name, sets=[])
    taken = settings_from_json(book.settings("r", "/prepared", "/cache"))
    assert (taken.workload.buckets, taken.training.steps) == (book.workload.buckets, book.training.steps)


def test_one_beginning(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(SMALL)
    with pytest.raises(ConfigError, match="init_from"):
        load_playbook(str(path), sets=["resume_from=/c", "init_from=/c"])
    settings = load_playbook(str(path), sets=["init_from=/c"]).settings("r", None, "/cache")
    settings["training"]["resume_from"] = "/c"
    with pytest.raises(InputError, match="init_from"):
        settings_from_json(settings)


@pytest.mark.parametrize(
    ("given", "good"),
    [
        ("{enable_thinking: false, reasoning_effort: high, budget: 64, share: 0.5}", True),
        *(("{}", True), ("~", True)),
        *(
            (wrong, False)
            for wrong in ("[enable_thinking]", "{enable-thinking: 1}", "{a: [1]}", "{a: ''}", "{a: null}")
        ),
        ("{a: .inf}", False),
        *((f"{{{name}: a}}", False) for name in RESERVED_VARIABLES),
    ],
)
def test_variables_of_the_chat_template(tmp_path: Path, given: str, good: bool) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(SMALL)
    settings = load_playbook(str(path), sets=[]).settings("r", None, "/cache")
    settings["training"]["chat_template_kwargs"] = parse_document(given, "x").data
    path.write_text(SMALL.replace("{steps: 5}", f"{{steps: 5, chat_template_kwargs: {given}}}"))
    if good:
        taken = load_playbook(str(path), sets=[]).settings("r", None, "/cache")
        assert taken == settings
        assert settings_from_json(taken).training.chat_template_kwargs == parse_document(given, "x").data
        return
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        load_playbook(str(path), sets=[])
    with pytest.raises(InputError, match="chat_template_kwargs"):
        settings_from_json(settings)


def test_dpace_has_no_decay(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(SMALL)
    with pytest.raises(ConfigError, match="leave decay_gamma out"):
        load_playbook(str(path), sets=["loss_type=dpace", "decay_gamma=4"])
    settings = load_playbook(str(path), sets=["loss_type=dpace"]).settings("r", None, "/cache")
    settings["training"]["decay_gamma"] = 4
    with pytest.raises(InputError, match="decay_gamma"):
        settings_from_json(settings)


def test_what_is_judged_while_training_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(SMALL)
    with pytest.raises(ConfigError, match="evaluate_every"):
        load_playbook(str(path), sets=["evaluation_prompts=0", "evaluate_every=5"])
    settings = load_playbook(str(path), sets=["evaluate_every=5"]).settings("r", None, "/cache")
    assert settings_from_json(settings).training.evaluate_every == 5
    settings["training"]["evaluation_prompts"] = 0
    with pytest.raises(InputError, match="evaluate_every"):
        settings_from_json(settings)


def test_layer_types_and_window_fit_together(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(SMALL)
    both = ["draft_layers=2", "sliding_window=32"]
    taken = load_playbook(str(path), sets=[*both, "layer_types=[sliding_attention, full_attention]"])
    assert settings_from_json(taken.settings("r", None, "/cache")).workload.layer_types[0] == "sliding_attention"
    none_slides = [*both, "layer_types=[full_attention, full_attention]"]
    for wrong in (none_slides, ["draft_layers=1", "sliding_window=32"]):
        with pytest.raises(ConfigError, match="sliding_window is 32 and no layer slides"):
            load_playbook(str(path), sets=wrong)
        settings = load_playbook(str(path), sets=[]).settings("r", None, "/cache")
        for each in wrong:
            key, _, text = each.partition("=")
            settings["workload"][key] = parse_document(text, "x").data
        with pytest.raises(InputError, match="no layer is sliding_attention"):
            settings_from_json(settings)


@pytest.mark.parametrize("given", GOOD)
def test_what_passes_here_the_trainer_takes(given: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(SMALL)
    settings_from_json(load_playbook(str(path), sets=[given]).settings("r", None, "/cache"))


def test_an_endpoint_is_an_engine_s(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(SMALL)
    endpoint = "endpoint=http://127.0.0.1:8000/v1"
    taken = settings_from_json(
        load_playbook(str(path), sets=["engine=openai", endpoint, "endpoint_model=a/b"]).settings("r", None, "/c")
    )
    assert (taken.training.endpoint, taken.training.endpoint_concurrency) == ("http://127.0.0.1:8000/v1", 16)
    with pytest.raises(ConfigError, match="endpoint"):
        load_playbook(str(path), sets=["engine=openai"])
    settings = load_playbook(str(path), sets=[]).settings("r", None, "/c")
    settings["training"]["engine"] = "openai"
    with pytest.raises(InputError, match="endpoint"):
        settings_from_json(settings)


@pytest.mark.parametrize("given", BAD)
def test_what_the_trainer_refuses_is_refused_here(given: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(SMALL)
    settings = load_playbook(str(path), sets=[]).settings("r", None, "/cache")
    key, _, text = given.partition("=")
    with pytest.raises(ConfigError, match=key):
        load_playbook(str(path), sets=[given])
    section = "workload" if key in settings["workload"] else "training"
    settings[section][key] = parse_document(text, "x").data if text else None
    with pytest.raises(InputError):
        settings_from_json(settings)
