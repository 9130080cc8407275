"""The `export` verb: the speculators format, whole or absent, and the same drafter read back from it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.commands import Desk
from tests.trainer.drafting import batch, brought_home, drafter, generator
from trainer import checkpoint as checkpoints
from trainer import export as exporting
from trainer.block_mask import dense_block_masks
from trainer.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from trainer.dflash_model import DFlashDrafter, DrafterConfig
from trainer.errors import InputError
from trainer.export import export, read_export
from trainer.facts import target_facts
from trainer.files import sha256_file
from trainer.settings import settings_from_json

pytestmark = pytest.mark.torch

SHAPE = {"mask_token": "<reserved_0>", "draft_layers": 2, "block_size": 4}
WINDOW = {"sliding_window": 6, "sliding_window_non_causal": True, "sliding_window_origin": "anchor"}


@pytest.fixture(scope="module")
def qwen3_target(tiny_target, tmp_path_factory):
    """Tied, in several files, its heads wider than the hidden size says; the tokenizer is the Llama's."""
    folder = tmp_path_factory.mktemp("qwen3")
    config = transformers.Qwen3Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=48,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        transformers.Qwen3ForCausalLM(config).save_pretrained(folder, max_shard_size="8KB")
    assert (folder / "model.safetensors.index.json").is_file()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_target / name, folder)
    return folder


@pytest.fixture
def make(tmp_path):
    """Settings for a target, and a random drafter's checkpoint of them, as `collect` brings it."""

    def make(target, dtype=torch.float32, **workload):
        settings = settings_from_json(
            {
                "contract": 1,
                "workload": {"target": str(target), **SHAPE, **workload},
                "training": {"steps": 1},
                "cache": str(tmp_path / "cache"),
            }
        )
        config = target_facts(settings).drafter
        folder = save_checkpoint(tmp_path, 80, drafter(3, dtype, config).state_dict(), config, {})
        return settings, brought_home(folder)

    return make


def logits(config, weights, embedding, head):
    """What a drafter says over a random batch: [2, A * B, V]."""
    model = DFlashDrafter(config, dtype=head.dtype)
    model.load_state_dict(weights)
    data = batch(5)
    width = config.hidden_size
    features = torch.randn((2, 14, 2 * width), generator=generator(6)).to(head.dtype)
    ids = torch.randint(0, 40, (2, 5 * 4), generator=generator(7))
    masks = dense_block_masks(config, data.anchors, data.lengths, 14)
    with torch.no_grad():
        return model(embedding[ids], features, data.anchors.positions, *masks) @ head.T


@pytest.mark.parametrize("workload", [{}, WINDOW], ids=["full", "sliding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_an_export_that_is_read_drafts_the_same_bit_for_bit(
    make, tmp_path, tiny_target, qwen3_target, family, dtype, workload
):
    target = {"qwen3": qwen3_target, "llama": tiny_target}[family]
    settings, folder = make(target, dtype, **workload)
    export(settings, folder, None, tmp_path / "out")
    config, weights = load_checkpoint(folder, resumable=False)
    found, tensors = read_export(tmp_path / "out", config.num_target_layers)
    assert DrafterConfig.from_json(found) == config
    embedding, head = tensors.pop("embed_tokens.weight"), tensors.pop("lm_head.weight")
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    own = [each.weight.detach().to(dtype) for each in (model.model.embed_tokens, model.lm_head)]
    assert torch.equal(own[0], own[1]) == (family == "qwen3")
    wanted = logits(config, weights, *own)
    assert torch.equal(logits(DrafterConfig.from_json(found), tensors, embedding, head), wanted)
    assert wanted.isfinite().all()


def test_the_config_is_what_speculators_and_vllm_read(make, tmp_path, tiny_target):
    settings, folder = make(tiny_target, torch.bfloat16)
    export(settings, folder, "org/target", tmp_path / "out")
    assert sorted(each.name for each in tmp_path.iterdir() if each.name != "cache") == ["out", "step-000080"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    layers = config.pop("transformer_layer_config")
    assert config == {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        # the drafter's layers are 1 and 2, "after layer i"
        "aux_hidden_state_layer_ids": [2, 3],
        "block_size": 4,
        "draft_vocab_size": 48,
        "dtype": "bfloat16",
        "mask_token_id": 6,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "target_hidden_size": 32,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    # what the package and vLLM build the layers from
    read = transformers.Qwen3Config(**layers)
    assert (read.hidden_size, read.num_hidden_layers, read.layer_types) == (32, 2, ["full_attention"] * 2)
    assert read.rope_parameters["rope_theta"] == layers["rope_theta"] == 10000.0
    assert layers["model_type"] == "qwen3"


def test_a_window_is_told(make, tmp_path, tiny_target):
    settings, folder = make(tiny_target, **WINDOW)
    export(settings, folder, None, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    layers = config["transformer_layer_config"]
    assert config["sliding_window_non_causal"] is True
    assert (layers["is_causal"], layers["sliding_window"], layers["use_sliding_window"]) == (False, 6, True)
    assert layers["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["sliding_window_origin"] == "anchor"


def test_the_manifest_says_what_is_there_and_from_what(make, tmp_path, tiny_target):
    settings, folder = make(tiny_target)
    export(settings, folder, None, tmp_path / "out")
    out = tmp_path / "out"
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["v"], manifest["kind"], manifest["format"], manifest["step"]) == (1, "export", "speculators", 80)
    assert manifest["made_from"] == {"weights_sha256": sha256_file(folder / "model.safetensors")}
    assert {each["path"] for each in manifest["files"]} == {"model.safetensors", "config.json"}
    assert {each.name for each in out.iterdir()} == {"model.safetensors", "config.json", "manifest.json"}
    for each in manifest["files"]:
        assert each["size"] == (out / each["path"]).stat().st_size
        assert each["sha256"] == sha256_file(out / each["path"])
    verifier = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == str(tiny_target)


def test_an_empty_folder_and_a_stale_part_make_room_and_nothing_else_does(make, tmp_path, tiny_target):
    settings, folder = make(tiny_target)
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "torn").write_text("")
    export(settings, folder, None, out)
    before = {each.name: each.read_bytes() for each in out.iterdir()}
    assert "torn" not in before
    with pytest.raises(InputError, match="there is something already"):
        export(settings, folder, "another", out)
    assert {each.name: each.read_bytes() for each in out.iterdir()} == before
    with pytest.raises(InputError, match="there is something already"):
        export(settings, folder, None, folder / "config.json")


def without(name):
    return lambda tensors: {key: each for key, each in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (without("lm_head.weight"), "lm_head.weight is missing"),
        (without("fc.weight"), "fc.weight is missing"),
        (lambda t: {**t, "d2t": torch.zeros(48)}, "d2t is not in the contract"),
        (lambda t: {**t, "embed_tokens.weight": t["embed_tokens.weight"][:40]}, "its shape must be"),
        (lambda t: {**t, "lm_head.weight": t["embed_tokens.weight"].clone()}, "lm_head.weight is not in the file"),
        (lambda t: {key: each.bfloat16() for key, each in t.items()}, "they must agree"),
    ],
)
def test_a_writer_that_errs_in_the_tensors_leaves_nothing(make, tmp_path, monkeypatch, tiny_target, fault, message):
    settings, folder = make(tiny_target)
    right = checkpoints.save_tensors
    monkeypatch.setattr(exporting, "save_tensors", lambda path, tensors: right(path, fault(tensors)))
    with pytest.raises(CheckpointError, match=message):
        export(settings, folder, None, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda c: c.update(aux_hidden_state_layer_ids=[1, 2]), "another drafter"),
        (lambda c: c.update(mask_token_id=7), "another drafter"),
        (lambda c: c["transformer_layer_config"].update(rms_norm_eps=1e-5), "another drafter"),
        (lambda c: c["transformer_layer_config"].update(rope_theta=5e5), "rope_parameters is"),
        (lambda c: c.update(block_size=8), "speculative_tokens is 3"),
        (lambda c: c.update(sample_from_anchor=True), "sample_from_anchor is"),
        (lambda c: c.update(draft_vocab_size=32), "draft_vocab_size is 32"),
        (lambda c: c.update(speculators_model_type="eagle3"), "speculators_model_type is"),
        (lambda c: c.update(sliding_window_non_causal=True), "sliding_window_non_causal is"),
        (lambda c: c.pop("transformer_layer_config"), "transformer_layer_config"),
        (lambda c: c["transformer_layer_config"].update(hidden_size=16), "target_hidden_size is 32"),
        (lambda c: c["transformer_layer_config"].update(intermediate_size=16), "its shape must be"),
    ],
)
def test_a_writer_that_errs_in_the_config_leaves_nothing(make, tmp_path, monkeypatch, tiny_target, fault, message):
    settings, folder = make(tiny_target)
    right = exporting.speculators_config

    def erring(*arguments):
        config = right(*arguments)
        fault(config)
        return config

    monkeypatch.setattr(exporting, "speculators_config", erring)
    with pytest.raises(CheckpointError, match=message):
        export(settings, folder, None, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_what_the_format_cannot_say_or_the_settings_do_not_describe_is_refused(make, tmp_path, tiny_target):
    settings, folder = make(tiny_target)
    other = replace(settings, workload=replace(settings.workload, block_size=8))
    with pytest.raises(InputError, match="block_size 4, the settings give 8"):
        export(other, folder, None, tmp_path / "out")
    shutil.rmtree(folder)
    settings, folder = make(tiny_target, target_layers=[1, 4])
    with pytest.raises(InputError, match="target layer 4 is the last one"):
        export(settings, folder, None, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_target_without_its_embedding_is_refused(make, tmp_path, tiny_target):
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    settings, folder = make(target)
    tensors = load_file(target / "model.safetensors")
    checkpoints.save_tensors(target / "model.safetensors", without("model.embed_tokens.weight")(tensors))
    with pytest.raises(InputError, match=r"model.embed_tokens.weight cannot be read"):
        export(settings, folder, None, tmp_path / "out")
    cut = {**tensors, "lm_head.weight": tensors["lm_head.weight"][:40].clone()}
    checkpoints.save_tensors(target / "model.safetensors", cut)
    with pytest.raises(InputError, match=r"lm_head.weight is \(40, 32\)"):
        export(settings, folder, None, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_a_person_exports_what_collect_brought(make, tmp_path, tiny_target):
    """The whole way: the command, the bundled trainer in a process of its own, the folder."""
    desk = Desk(tmp_path)
    _, folder = make(tiny_target)
    run = desk.runs / "20261129-101500-quickstart-1a2b"
    (run / "checkpoints").mkdir(parents=True)
    shutil.move(folder, run / "checkpoints")
    # as the host has them: its target and its cache are not here
    written = {"contract": 1, "workload": {"target": "/host/target", **SHAPE}, "training": {"steps": 1}}
    written |= {"prepared": "/host/prepared", "cache": "/host/cache", "run": run.name}
    (run / "settings.json").write_text(json.dumps(written))
    refused = desk.run("export", "--out", "served", host=False)
    assert refused.code == 2, refused.out
    assert "/host/target does not exist" in refused.error["what"]
    assert "--target" in refused.error["fix"]
    ended = desk.run("export", "--out", "served", "--target", str(tiny_target), "--verifier", "org/x", host=False)
    assert ended.code == 0, ended.out
    assert ended.result["run"] == run.name
    assert ended.result["folder"] == str(tmp_path / "served")
    read_export(tmp_path / "served", 5)
    verifier = json.loads((tmp_path / "served" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "org/x"
    assert json.loads((run / "settings.json").read_text()) == written
