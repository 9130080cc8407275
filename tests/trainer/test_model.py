"""The drafter: shape, names, initialisation, and its numbers against a slow reference and against Qwen3's layers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code

from tests.trainer.drafting import CONFIG, batch, drafter, generator, windows
from tests.trainer.reference import reference_hidden, reference_loss
from trainer.block_mask import dense_block_mask
from trainer.dflash_model import (
    DFlashDrafter,
    DrafterConfig,
    create_drafter_config,
    default_target_layer_ids,
    drafted,
)
from trainer.drafter_config import SlidingWindow
from trainer.errors import InputError
from trainer.loss import block_labels, block_loss, slot_decay
from trainer.serving_layout import expected_shapes

pytestmark = pytest.mark.torch


def forward(model, data):
    return model(data.block_embeddings, data.target_hidden, data.anchors.positions, *data.masks)


@settings(max_examples=18, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 2),
    st.integers(2, 10),
    st.integers(1, 5),
    st.integers(2, 5),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 2).flatmap(lambda more: st.sampled_from([(more, kind) for kind in range(5)])),
    st.sampled_from(["dflash", "dpace"]),
)
def test_hidden_states_loss_and_every_gradient_equal_the_reference(
    seed, rows, length, anchors, block_size, supervised, window, loss_type
):
    more, kind = window
    data = batch(
        seed, rows=rows, length=length, anchors=anchors, block_size=block_size, supervised=supervised,
        window=windows(block_size + more)[kind],
    )  # fmt: skip
    model = drafter(seed, config=data.config)
    hidden = forward(model, data)
    gamma = slot_decay(loss_type, block_size, 2.0)
    labels, weights = block_labels(data.input_ids, data.loss_mask, data.lengths, data.anchors, block_size, gamma)
    loss = block_loss(hidden, data.embedding, labels, weights, chunk=5, loss_type=loss_type)
    loss.loss_sum.backward()

    state = {name: t.detach().clone().requires_grad_() for name, t in model.state_dict().items()}
    wanted = reference_hidden(state, data.config, data.block_embeddings, data.target_hidden, data.anchors)
    torch.testing.assert_close(hidden, drafted(wanted, block_size), rtol=1e-9, atol=1e-9)
    total, weight_sum, right, counted = reference_loss(
        wanted, data.embedding, data.input_ids, data.loss_mask, data.lengths, data.anchors, block_size,
        None if loss_type == "dpace" else gamma,
    )  # fmt: skip
    assert loss.loss_sum.item() == pytest.approx(total.item(), rel=1e-6, abs=1e-6)
    assert loss.weight_sum.item() == pytest.approx(weight_sum, rel=1e-6)
    assert (loss.first_slot_correct.item(), loss.first_slot_count.item()) == (right, counted)
    if not counted and not weight_sum:
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        return
    total.backward()
    for name, parameter in model.named_parameters():
        # the weights are float32, so two ways of taking exp() differ in their last digit
        scale = state[name].grad.abs().max()
        torch.testing.assert_close(parameter.grad, state[name].grad, rtol=1e-6, atol=float(1e-6 * scale), msg=name)


def test_a_drafter_that_slides_wants_a_mask_for_each_kind_of_layer():
    data = batch(1, window=SlidingWindow(5))
    model = drafter(1, config=data.config)
    assert len(data.masks) == 2
    with pytest.raises(ValueError, match="1 masks, one each is needed for full_attention, sliding_attention"):
        model(data.block_embeddings, data.target_hidden, data.anchors.positions, data.masks[0])
    every = replace(data.config, sliding_layers=(0, 1))
    only = drafter(1, config=every)(
        data.block_embeddings, data.target_hidden, data.anchors.positions, data.masks[1]
    )  # fmt: skip
    assert only.shape == forward(model, data).shape
    assert not torch.allclose(only, forward(model, data))


def test_a_window_that_holds_everything_is_full_attention_but_for_its_block():
    data = batch(4, length=10)
    wide = batch(4, length=10, window=SlidingWindow(10 + 4, causal=False))
    assert torch.equal(forward(drafter(2), data), forward(drafter(2, config=wide.config), wide))
    causal = batch(4, length=10, window=SlidingWindow(10 + 4))
    assert not torch.allclose(forward(drafter(2), data), forward(drafter(2, config=causal.config), causal))


def test_layers_are_qwen3_layers_under_the_serving_names():
    """With no context a drafter is a Qwen3 stack that looks both ways: the layers serving engines will build."""
    qwen = transformers.Qwen3Config.from_dict(CONFIG.to_json("float32"))
    qwen._attn_implementation = "eager"
    assert qwen.rope_parameters["rope_theta"] == CONFIG.rope_theta
    served = transformers.models.qwen3.modeling_qwen3.Qwen3Model(qwen).double()
    model = drafter(4)
    own = {k: v for k, v in model.state_dict().items() if k.startswith(("layers.", "norm."))}
    missing, unexpected = served.load_state_dict(own, strict=False)
    assert unexpected == []
    assert missing == ["embed_tokens.weight"]
    block = torch.randn((1, 4, 16), generator=generator(1), dtype=torch.float64)
    sees_all = torch.zeros((1, 1, 4, 4), dtype=torch.float64)
    with torch.no_grad():
        wanted = served(inputs_embeds=block, attention_mask=sees_all, position_ids=torch.arange(4)[None])[0]
        found = model(block, torch.zeros((1, 0, 32)).double(), torch.zeros((1, 1)).long(), sees_all == 0)
    torch.testing.assert_close(found, wanted[:, 1:], rtol=1e-5, atol=1e-5)


def test_five_layers_make_58_tensors_with_the_contracts_names_and_shapes():
    config = replace(CONFIG, num_hidden_layers=5, num_target_layers=36, target_layer_ids=(1, 9, 17, 25, 33))
    with torch.device("meta"):
        state = DFlashDrafter(config, device="meta").state_dict()
    assert len(state) == 58
    assert {name: tuple(t.shape) for name, t in state.items()} == expected_shapes(config.to_json())
    assert state["fc.weight"].shape == (16, 80)
    assert state["layers.4.self_attn.k_proj.weight"].shape == (12, 16)


def test_only_the_given_generator_draws_the_weights():
    before = torch.get_rng_state()
    model = DFlashDrafter(CONFIG, generator=generator(7))
    low = DFlashDrafter(CONFIG, dtype=torch.bfloat16, generator=generator(7))
    other = DFlashDrafter(CONFIG, generator=generator(8))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(model.fc.weight, other.fc.weight)
    for (name, wide), narrow in zip(model.state_dict().items(), low.state_dict().values(), strict=True):
        assert torch.equal(wide.bfloat16(), narrow), name
    gate = DFlashDrafter(replace(CONFIG, intermediate_size=4000, initializer_range=0.02), generator=generator(1))
    weight = gate.layers[0].mlp.gate_proj.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(weight.mean().item()) < 3e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_near_float64(dtype):
    data = batch(2)
    wide = forward(drafter(3), data)
    data.target_hidden, data.embedding = data.target_hidden.to(dtype), data.embedding.to(dtype)
    found = forward(drafter(3, dtype), data)
    assert found.dtype == dtype
    error = (found.double() - wide).norm() / wide.norm()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]


def test_a_step_is_one_graph_and_gives_the_same_gradients():
    data = batch(6)
    labels, weights = block_labels(data.input_ids, data.loss_mask, data.lengths, data.anchors, 4, 4.0)
    mask = dense_block_mask(data.anchors, data.lengths, 14, 4)
    arguments = (data.block_embeddings, data.target_hidden, data.anchors.positions, mask)
    eager, compiled = drafter(5), drafter(5)

    def step(model):
        return block_loss(model(*arguments), data.embedding, labels, weights, chunk=9).loss_sum

    step(eager).backward()
    # fullgraph: a graph break is an error; aot_eager: forward and backward are traced, nothing is code-generated
    torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")(compiled).backward()
    for (name, one), two in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, msg=name)


@pytest.mark.compiles
def test_compiled_layers_read_one_table_of_rotations():
    data, model = batch(6, dtype=torch.float32), drafter(5, torch.float32)
    arguments = (data.block_embeddings, data.target_hidden, data.anchors.positions, *data.masks)
    hidden, (code, *_) = run_and_get_code(torch.compile(model, fullgraph=True, dynamic=False), *arguments)
    torch.testing.assert_close(hidden, forward(model, data))
    # the blocks' and the context's, for both layers
    assert len(re.findall(r"= torch\.ops\.dflash\.rotary_tables\.default\(", code)) == 2
    assert "cos(" not in code


def test_default_target_layers():
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(30, 1) == (15,)
    assert default_target_layer_ids(30, 2) == (1, 27)
    with pytest.raises(InputError, match="name the layers"):
        default_target_layer_ids(4, 3)


def test_a_config_follows_its_target():
    qwen = transformers.Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=100, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    config = create_drafter_config(qwen, draft_layers=3, block_size=8, mask_token_id=99)
    assert (config.head_dim, config.rope_theta, config.intermediate_size) == (32, 5e5, 96)
    assert config.target_layer_ids == (1, 5, 9)
    llama = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=6, num_attention_heads=4, vocab_size=100)
    config = create_drafter_config(
        llama, draft_layers=2, block_size=8, mask_token_id=0, target_layer_ids=[0, 2, 5], intermediate_size=33
    )
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (16, 4, 33)
    assert config.target_layer_ids == (0, 2, 5)
    assert DrafterConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("window", windows(9)[1:])
def test_a_window_is_written_as_engines_read_it(window):
    llama = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=8, num_attention_heads=4, vocab_size=100)
    config = create_drafter_config(llama, draft_layers=3, block_size=8, mask_token_id=0, window=window)
    written = config.to_json()
    assert written["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert (written["sliding_window"], written["use_sliding_window"]) == (9, True)
    assert written.get("is_causal") == written["dflash_config"].get("causal") == (None if window.causal else False)
    marked = written["dflash_config"].get("sliding_window_origin")
    assert marked == ("anchor" if window.origin == "anchor" else None)
    assert DrafterConfig.from_json(written) == config
    # Qwen3's own config, which engines build the layers from
    qwen = transformers.Qwen3Config.from_dict(written)
    assert (qwen.layer_types, qwen.sliding_window) == (written["layer_types"], 9)


def test_layer_types_may_be_named_one_by_one():
    llama = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=8, num_attention_heads=4, vocab_size=100)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    window = SlidingWindow(16)
    config = create_drafter_config(
        llama, draft_layers=3, block_size=8, mask_token_id=0, layer_types=kinds, window=window
    )  # fmt: skip
    assert config.to_json()["layer_types"] == kinds
    assert DrafterConfig.from_json(config.to_json()) == config
    for change, message in (
        ({"layer_types": kinds[:2]}, "2 types for 3 layers"),
        ({"window": None}, "sliding layers need a window"),
        ({"layer_types": ["full_attention"] * 3}, "sliding layers need a window"),
        ({"window": SlidingWindow(7)}, "at least 8"),
        ({"window": SlidingWindow(9, "slot")}, "'query' or 'anchor'"),
    ):
        options = {"layer_types": kinds, "window": window, **change}
        with pytest.raises(InputError, match=message):
            create_drafter_config(llama, draft_layers=3, block_size=8, mask_token_id=0, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, "1 layers|for 2 layers"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "'full_attention' or 'sliding_attention'"),
        ({"use_sliding_window": False}, "must agree"),
        ({"sliding_window": None}, "give their window"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3], "sliding_window_origin": "x"}}, "origin"),
    ],
)
def test_a_window_that_a_config_tells_in_two_ways_is_refused(change, message):
    written = replace(CONFIG, sliding_layers=(0,), window=SlidingWindow(9)).to_json()
    with pytest.raises(InputError, match=message):
        DrafterConfig.from_json({**written, **change})


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (transformers.GPT2Config(), {}, "intermediate_size"),
        (
            transformers.LlamaConfig(
                rope_parameters={
                    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                }
            ),
            {},
            "'llama3'",
        ),
        (transformers.LlamaConfig(), {"mask_token_id": 32000}, "0 to 31999"),
        (transformers.LlamaConfig(), {"target_layer_ids": [3, 32]}, "0 to 31"),
        (transformers.LlamaConfig(), {"target_layer_ids": [5, 3]}, "ascending"),
        (transformers.LlamaConfig(), {"block_size": 1}, "at least 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(target, options, message):
    values = {"draft_layers": 2, "block_size": 8, "mask_token_id": 5, **options}
    with pytest.raises(InputError, match=message):
        create_drafter_config(target, **values)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("head_dim", 7, "7 is odd"),
        ("head_dim", 258, "258 is too wide"),
        ("num_hidden_layers", 0, "0 is too small"),
        ("block_size", 1, "1 is too small"),
        ("num_attention_heads", 3, "3 heads do not divide among 2"),
        ("mask_token_id", 40, "40 is no token"),
        ("target_layer_ids", (3, 1), "no layers of the target"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_before_anything_is_built(field: str, value: object, words: str) -> None:
    with pytest.raises(InputError, match=words) as found:
        replace(CONFIG, **{field: value})
    assert found.value.where == field
