"""The serving layout: an independent reader of files, which stands between what is written and its name."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.trainer.drafting import CONFIG, batch, drafter, generator
from trainer import checkpoint
from trainer.block_mask import dense_block_mask
from trainer.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from trainer.dflash_model import DFlashDrafter, DrafterConfig, create_drafter_config
from trainer.serving_layout import check_config, check_serving_layout

pytestmark = pytest.mark.torch

QWEN3 = transformers.Qwen3Config(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=40,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    tie_word_embeddings=True,
)
LLAMA = transformers.LlamaConfig(
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=40,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    tie_word_embeddings=False,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [QWEN3, LLAMA], ids=["qwen3", "llama"])
def test_a_checkpoint_that_comes_back_drafts_the_same_bit_for_bit(tmp_path, target, dtype):
    config = create_drafter_config(target, draft_layers=2, block_size=4, mask_token_id=39)
    model = drafter(3, dtype, config)
    folder = save_checkpoint(tmp_path, 7, model.state_dict(), config, {})
    served = check_serving_layout(folder)
    assert (served["rope_theta"], served["rms_norm_eps"]) == (config.rope_theta, target.rms_norm_eps)
    found, state = load_checkpoint(folder)
    again = DFlashDrafter(found, dtype=dtype, generator=generator(9))
    again.load_state_dict(state)
    data = batch(5, dtype=dtype)
    mask = dense_block_mask(data.anchors, data.lengths, data.input_ids.shape[1], 4)
    head = torch.randn((40, 16), generator=generator(2)).to(dtype)
    with torch.no_grad():
        logits = [
            each(data.block_embeddings, data.target_hidden, data.anchors.positions, mask) @ head.T
            for each in (model, again)
        ]
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()


SQUARE = replace(CONFIG, num_attention_heads=4, head_dim=4, num_key_value_heads=4)
"""q, k, v and o are all 16 x 16: the shapes tell none of them from another."""


def swapped(state):
    """q_proj under the name of k_proj, and k_proj under the name of q_proj."""
    other = {"q": "k", "k": "q"}
    return {re.sub("([qk])_proj", lambda found: f"{other[found[1]]}_proj", name): each for name, each in state.items()}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda s: {k: v for k, v in s.items() if "up_proj" not in k}, "mlp.up_proj.weight is missing"),
        (lambda s: {f"model.{k}": v for k, v in s.items()}, "is missing"),
        (lambda s: {**s, "embed_tokens.weight": torch.zeros(40, 16)}, "not in the contract"),
        (lambda s: {k: v.T.contiguous() if k == "fc.weight" else v for k, v in s.items()}, "its shape must be"),
        (lambda s: {k: v.half() for k, v in s.items()}, "F16"),
        (lambda s: {k: v.bfloat16() for k, v in s.items()}, "they must agree"),
        (lambda s: {k: v.bfloat16().float() for k, v in s.items()}, "is not in the file as it is in memory"),
        (lambda s: {k: v.T.contiguous() if "o_proj" in k else v for k, v in s.items()}, "o_proj.weight is not in the"),
        (swapped, "_proj.weight is not in the file"),
        (lambda s: {k: v + 1 if k == "norm.weight" else v for k, v in s.items()}, "norm.weight is not in the file"),
        (lambda s: {k: torch.nan * v if k == "norm.weight" else v for k, v in s.items()}, "norm.weight is not in"),
    ],
)  # fmt: skip
def test_a_writer_that_errs_in_the_tensors_is_stopped_before_the_folder_has_its_name(
    tmp_path, monkeypatch, fault, message
):
    def erring(tensors, path, metadata):
        save_file(fault(tensors), path, metadata=metadata)

    state = drafter(1, torch.float32, SQUARE).state_dict()
    monkeypatch.setattr(checkpoint, "save_file", erring)
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, 1, state, SQUARE, {})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    save_checkpoint(tmp_path, 1, state, SQUARE, {})


FAULTS = [
    (lambda c: c.pop("rope_theta"), "rope_theta is missing"),
    (lambda c: c.pop("dflash_config"), "dflash_config is missing"),
    (lambda c: c["dflash_config"].pop("mask_token_id"), "dflash_config.mask_token_id is missing"),
    (lambda c: c.update(architectures=["Qwen3ForCausalLM"]), "architectures is"),
    (lambda c: c.update(model_type="llama"), "model_type is"),
    (lambda c: c.update(hidden_act="gelu"), "hidden_act is"),
    (lambda c: c.update(rope_scaling={"rope_type": "yarn"}), "rope_scaling is"),
    (lambda c: c.update(attention_bias=True), "attention_bias is"),
    (lambda c: c.update(attention_bias=0), "attention_bias is"),
    (lambda c: c.update(head_dim=5), "head_dim 5"),
    (lambda c: c.update(num_attention_heads="4"), "num_attention_heads is"),
    (lambda c: c.update(num_attention_heads=True), "num_attention_heads is"),
    (lambda c: c.update(num_key_value_heads=3), "3 key heads"),
    (lambda c: c.update(rms_norm_eps=float("nan")), "rms_norm_eps is"),
    (lambda c: c.update(rope_theta=0), "rope_theta is"),
    (lambda c: c.update(block_size=1), "block_size is"),
    (lambda c: c["dflash_config"].update(block_size=8), "must be equal"),
    (lambda c: c["dflash_config"].update(mask_token_id=40), "a vocabulary of 40"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[]), r"target_layer_ids \[\]"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[3, 1]), "ascending"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[1, 6]), "of 6 target layers"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[1, 2.0]), "a list of layer ids"),
    (lambda c: c.update(layer_types=["full_attention"]), "for each layer"),
    (lambda c: c.update(layer_types=["full_attention", "causal"]), "for each layer"),
    (lambda c: c.update(use_sliding_window=True), "sliding layers need both"),
    (lambda c: c.update(sliding_window=64), "sliding layers need both"),
    (lambda c: c.update(layer_types=["sliding_attention", "full_attention"]), "sliding layers need both"),
    (lambda c: c.update(is_causal=True), "is_causal is"),
    (lambda c: c.update(is_causal=False), "both are needed"),
    (lambda c: c["dflash_config"].update(causal=False), "both are needed"),
    (lambda c: c["dflash_config"].update(use_swa=True), "use_swa is not in the contract"),
    (lambda c: c.update(draft_vocab_size=20), "draft_vocab_size is not in the contract.*is it"),
    (lambda c: c.update(rope_tetha=1.0), "is it rope_theta"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_config_that_engines_would_read_as_another_drafter_is_refused(fault, message):
    config = CONFIG.to_json("float32")
    check_config(config, "here")
    fault(config)
    with pytest.raises(CheckpointError, match=message):
        check_config(config, "here")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda c: c.update(rope_theta=1e6), "reads back as another drafter"),
        (lambda c: c["dflash_config"].update(mask_token_id=38), "reads back as another drafter"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[2, 4]), "reads back as another drafter"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 3, 4]), r"its shape must be \(16, 48\)"),
        (lambda c: c.update(torch_dtype="bfloat16"), "they must agree"),
        *FAULTS[:2],
    ],
)
def test_a_writer_that_errs_in_the_config_is_stopped_before_the_folder_has_its_name(
    tmp_path, monkeypatch, fault, message
):
    right = DrafterConfig.to_json

    def erring(self, dtype):
        config = json.loads(json.dumps(right(self, dtype)))
        fault(config)
        return config

    monkeypatch.setattr(DrafterConfig, "to_json", erring)
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, 1, drafter(1, torch.float32).state_dict(), CONFIG, {})
    assert list(tmp_path.iterdir()) == []


def test_sliding_layers_are_in_the_contract():
    config = CONFIG.to_json("float32")
    config.update(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=64)
    check_config(config, "here")
    config["is_causal"] = config["dflash_config"]["causal"] = False
    check_config(config, "here")
