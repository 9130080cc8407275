"""The drafter, slow and obvious: one block at a time, no mask, plain loops. float64, for tests only.

Written from the paper's description, not from the model: a block sees the context strictly before its anchor and the
whole of itself, so it is computed alone with exactly those keys. A query of a sliding layer sees those of them that lie
in its window, key by key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.anchors import Anchors
from trainer.drafter_config import DrafterConfig

State = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def rope(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate one head vector as complex numbers; angles in float32 as the specification says."""
    half = x.shape[0] // 2
    even = torch.arange(0, x.shape[0], 2, dtype=torch.float32)
    angle = torch.tensor(float(position)) * (1.0 / theta ** (even / x.shape[0]))
    turn = torch.complex(angle.cos().double(), angle.sin().double())
    turned = torch.complex(x[:half], x[half:]) * turn
    return torch.cat([turned.real, turned.imag])


def sees(config: DrafterConfig, layer: int, anchor: int, slot: int, place: int, *, own: bool) -> bool:
    """Whether slot `slot` of the block at `anchor` sees the key at `place`, of the context or of its `own` block."""
    window = config.window
    if layer not in config.sliding_layers or window is None:
        return True
    if own:
        return not window.causal or place <= anchor + slot
    if window.origin == "anchor":
        return anchor - place <= window.size
    return anchor + slot - place < window.size


def draft_block(state: State, config: DrafterConfig, embeddings: Tensor, context: Tensor, anchor: int) -> Tensor:
    """Final hidden states [B, D] of one block: `embeddings` [B, D], `context` [anchor, K * D]."""
    eps, dim = config.rms_norm_eps, config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    fused = rms(context @ state["fc.weight"].T, state["hidden_norm.weight"], eps)
    block = embeddings
    for layer in range(config.num_hidden_layers):
        w = {name.split(f"layers.{layer}.")[1]: t for name, t in state.items() if f"layers.{layer}." in name}
        normed = rms(block, w["input_layernorm.weight"], eps)
        visible = torch.cat([fused, normed])
        places = [*range(len(context)), *range(anchor, anchor + len(block))]
        seen = torch.tensor(
            [
                [sees(config, layer, anchor, slot, place, own=key >= len(context)) for key, place in enumerate(places)]
                for slot in range(len(block))
            ]
        )
        heads = []
        for head in range(config.num_attention_heads):
            own, shared = slice(head * dim, (head + 1) * dim), slice(head // group * dim, (head // group + 1) * dim)
            keys = rms(visible @ w["self_attn.k_proj.weight"][shared].T, w["self_attn.k_norm.weight"], eps)
            keys = torch.stack([rope(key, p, config.rope_theta) for key, p in zip(keys, places, strict=True)])
            values = visible @ w["self_attn.v_proj.weight"][shared].T
            queries = rms(normed @ w["self_attn.q_proj.weight"][own].T, w["self_attn.q_norm.weight"], eps)
            queries = torch.stack([rope(q, anchor + k, config.rope_theta) for k, q in enumerate(queries)])
            scores = (queries @ keys.T / math.sqrt(dim)).masked_fill(~seen, -math.inf)
            heads.append(scores.softmax(dim=-1) @ values)
        block = block + torch.cat(heads, dim=-1) @ w["self_attn.o_proj.weight"].T
        normed = rms(block, w["post_attention_layernorm.weight"], eps)
        gate, up = normed @ w["mlp.gate_proj.weight"].T, normed @ w["mlp.up_proj.weight"].T
        block = block + (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T
    return rms(block, state["norm.weight"], eps)


def reference_hidden(
    state: State, config: DrafterConfig, embeddings: Tensor, target_hidden: Tensor, anchors: Anchors
) -> Tensor:
    """[N, A * B, D], as DFlashDrafter.forward; padding slots see no context."""
    size = config.block_size
    rows = []
    for row in range(target_hidden.shape[0]):
        blocks = []
        for slot, (anchor, keep) in enumerate(
            zip(anchors.positions[row].tolist(), anchors.keep[row].tolist(), strict=True)
        ):
            context = target_hidden[row, : anchor if keep else 0]
            blocks.append(draft_block(state, config, embeddings[row, slot * size : (slot + 1) * size], context, anchor))
        rows.append(torch.cat(blocks))
    return torch.stack(rows)


def reference_loss(
    hidden: Tensor,
    head: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    lengths: Tensor,
    anchors: Anchors,
    block_size: int,
    gamma: float | None,
) -> tuple[Tensor, float, int, int]:
    """Loss sum, weight sum, first slots right, first slots counted: token by token. `gamma` None: D-PACE."""
    total, weights, right, counted = hidden.new_zeros(()), 0.0, 0, 0
    for row in range(input_ids.shape[0]):
        for slot, anchor in enumerate(anchors.positions[row].tolist()):
            used = [
                k for k in range(1, block_size)
                if anchors.keep[row, slot] and anchor + k < lengths[row] and loss_mask[row, anchor + k]
            ]  # fmt: skip
            logs = {
                k: (head @ hidden[row, slot * block_size + k]).log_softmax(dim=0)[input_ids[row, anchor + k]]
                for k in used
            }
            for k in used:
                place = anchor + k
                if gamma is None:
                    # the product of smoothed probabilities up to each slot from here on
                    weight = sum(
                        math.prod((1 + math.exp(float(logs[i].detach()))) / 2 for i in used if i <= last)
                        for last in used
                        if last >= k
                    )
                else:
                    weight = math.exp(-(k - 1) / gamma)
                logits = head @ hidden[row, slot * block_size + k]
                total = total - weight * logs[k]
                weights += weight
                if k == 1:
                    counted += 1
                    right += int(logits.argmax() == input_ids[row, place])
    return total, weights, right, counted
