"""The DFlash drafter: a small block-diffusion decoder fed with its target's hidden states.

Architecture after "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv:2602.06036v2, section 4
and appendix A.3); parameter names are those that SGLang and vLLM load.

Shapes: N rows, S context tokens, K target layers, D hidden size, A anchor slots, B block size, Q = A * B.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer import fp8
from trainer.block_attention import attend
from trainer.block_mask import BlockRanges, dense_mask_of
from trainer.drafter_config import (
    DrafterConfig,
    create_drafter_config,
    default_target_layer_ids,
)

__all__ = [
    "DFlashDrafter",
    "DrafterCache",
    "DrafterConfig",
    "create_drafter_config",
    "default_target_layer_ids",
    "drafted",
]

Mask = Tensor | BlockRanges | None
_M = TypeVar("_M")


def drafted(slots: Tensor, block_size: int) -> Tensor:
    """Of [N, A * block_size, ...], every block without its slot 0: [N, A * (block_size - 1), ...]."""
    return slots.unflatten(1, (-1, block_size))[:, :, 1:].flatten(1, 2)


class _Linear(nn.Linear):
    """A bias-free linear layer that is not initialised where it is built.

    nn.Linear draws from the process's default generator, which no worker thread may touch: a draw while
    another thread captures a CUDA graph kills that capture.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device | None, dtype: torch.dtype | None) -> None:
        super().__init__(inputs, outputs, bias=False, device=device, dtype=dtype)
        self.narrow = False

    def forward(self, x: Tensor) -> Tensor:
        """In 8-bit floats where it is `narrow`."""
        return fp8.linear(x, self.weight) if self.narrow else self.exact(x)

    def exact(self, x: Tensor) -> Tensor:
        """In the layer's dtype."""
        return F.linear(x, self.weight)

    def reset_parameters(self) -> None:
        """Left to DFlashDrafter, which draws from the caller's generator."""


class _Norm(nn.Module):
    """RMSNorm with the epsilon of the target; sums in float32 for bfloat16 input."""

    def __init__(self, size: int, eps: float, device: torch.device | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


# opaque to the compiler, which would make them again inside every layer's kernels, element by element
@torch.library.custom_op("dflash::rotary_tables", mutates_args=())
def _rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of `_Rotary`, for `positions` [N or 1, P]."""
    even = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequency = 1.0 / theta ** (even / head_dim)
    angle = positions[:, None, :, None].to(torch.float32) * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


@_rotary_tables.register_fake
def _(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    rows, count = positions.shape
    cos = torch.empty((rows, 1, count, head_dim), dtype=torch.float32, device=positions.device)
    return cos, torch.empty_like(cos)


@dataclass(frozen=True)
class _Rotary:
    """cos and sin, float32, [N or 1, 1, positions, head_dim]."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def at(positions: Tensor, head_dim: int, theta: float) -> _Rotary:
        """Tables for `positions` [N or 1, P]; made here, since a buffer would follow `.to(bfloat16)`."""
        return _Rotary(*_rotary_tables(positions, head_dim, theta))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate heads `x` [N, heads, P, head_dim]; the two halves of a head are a pair (Llama, Qwen3)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        first, second = wide.chunk(2, dim=-1)
        return (wide * self.cos + torch.cat([-second, first], dim=-1) * self.sin).to(x.dtype)


class _Attention(nn.Module):
    """Grouped-query attention of block queries over [context | blocks]; one k_proj and v_proj for both."""

    def __init__(self, config: DrafterConfig, device: torch.device | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.head_dim = dim
        self.grouped = config.num_attention_heads != config.num_key_value_heads
        self.q_proj = _Linear(width, queries, device, dtype)
        self.k_proj = _Linear(width, keys, device, dtype)
        self.v_proj = _Linear(width, keys, device, dtype)
        self.o_proj = _Linear(queries, width, device, dtype)
        self.q_norm = _Norm(dim, config.rms_norm_eps, device, dtype)
        self.k_norm = _Norm(dim, config.rms_norm_eps, device, dtype)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def context(self, fused: Tensor, rotary: _Rotary) -> tuple[Tensor, Tensor]:
        """Keys and values of the context's `fused` [N, P, D], as `_keys_values`; never in 8-bit floats.

        All blocks add to their gradient, and rounding a sum is not summing what is rounded.
        """
        return self._keys_values(self.k_proj.exact(fused), self.v_proj.exact(fused), rotary)

    def _keys_values(self, keys: Tensor, values: Tensor, rotary: _Rotary) -> tuple[Tensor, Tensor]:
        """Normed, rotated keys, and values, of the projections' outputs: two of [N, kv_heads, P, head_dim]."""
        return rotary.rotate(self.k_norm(self._heads(keys))), self._heads(values)

    def forward(
        self, block: Tensor, context: tuple[Tensor, Tensor], rotary: _Rotary, mask: Mask, drop: int | None = None
    ) -> Tensor:
        """`block` [N, Q, D] over the context's keys and values and its own; mask None: everything is seen.

        `drop`: the block size, where nobody wants what the anchors' slots give: `drafted` of the result.
        """
        queries = rotary.rotate(self.q_norm(self._heads(self.q_proj(block))))
        own = self._keys_values(self.k_proj(block), self.v_proj(block), rotary)
        if isinstance(mask, BlockRanges):
            mixed = attend(queries, context, own, mask)
        else:
            keys = torch.cat([context[0], own[0]], dim=2)
            values = torch.cat([context[1], own[1]], dim=2)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=self.grouped)
        states = mixed.transpose(1, 2).flatten(2)
        return self.o_proj(states if drop is None else drafted(states, drop))


class _MLP(nn.Module):
    def __init__(self, config: DrafterConfig, device: torch.device | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = _Linear(width, inner, device, dtype)
        self.up_proj = _Linear(width, inner, device, dtype)
        self.down_proj = _Linear(inner, width, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig, device: torch.device | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps, device, dtype)
        self.self_attn = _Attention(config, device, dtype)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps, device, dtype)
        self.mlp = _MLP(config, device, dtype)

    def forward(
        self, block: Tensor, context: tuple[Tensor, Tensor], rotary: _Rotary, mask: Mask, drop: int | None = None
    ) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(block), context, rotary, mask, drop)
        block = (block if drop is None else drafted(block, drop)) + mixed
        return block + self.mlp(self.post_attention_layernorm(block))


@dataclass
class DrafterCache:
    """Projected context of one text, a (keys, values) pair of [1, kv_heads, length, head_dim] for each layer.

    Only committed positions are in it: a block's own keys and values never enter.
    """

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Context positions held: 0 .. length - 1."""
        return self.layers[0][0].shape[2] if self.layers else 0


class DFlashDrafter(nn.Module):
    """The trainable drafter. Embedding and head are the target's, frozen, and not in here.

    Weights are drawn from N(0, initializer_range) in float32, each from a seed that `generator` gives, and then cast;
    norms are 1: the same generator state gives the same drafter in every dtype and on every device. Without a
    generator a fresh one with seed 0 is used, never the process's default one. On device "meta" nothing is drawn.
    With `narrow` the linear layers that blocks go through multiply 8-bit floats (`trainer.fp8`).
    """

    def __init__(
        self,
        config: DrafterConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
        narrow: bool = False,
    ) -> None:
        super().__init__()
        place = None if device is None else torch.device(device)
        width = config.hidden_size
        self.config = config
        self.fc = _Linear(len(config.target_layer_ids) * width, width, place, dtype)
        self.hidden_norm = _Norm(width, config.rms_norm_eps, place, dtype)
        self.layers = nn.ModuleList(_Layer(config, place, dtype) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(width, config.rms_norm_eps, place, dtype)
        for module in self.layers.modules():
            if isinstance(module, _Linear):
                module.narrow = narrow
        self._attention_types = config.attention_types
        self._layer_masks = [config.attention_types.index(kind) for kind in config.layer_types]
        self._draw(generator if generator is not None else torch.Generator().manual_seed(0))

    @torch.no_grad()
    def _draw(self, generator: torch.Generator) -> None:
        weights = [each.weight for each in self.modules() if isinstance(each, _Linear) and not each.weight.is_meta]
        seeds = torch.randint(2**62, (len(weights),), generator=generator, device=generator.device).tolist()

        @torch.no_grad()  # a thread's own
        def draw(weight: Tensor, seed: int) -> None:
            numbers = torch.empty(weight.shape, dtype=torch.float32)
            numbers.normal_(0.0, self.config.initializer_range, generator=torch.Generator().manual_seed(seed))
            weight.copy_(numbers)

        # side by side: a generator gives 0.1 billion numbers a second, and a large drafter has more than one billion
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 16)) as pool:
            list(pool.map(draw, weights, seeds))

    def _rotary(self, positions: Tensor) -> _Rotary:
        return _Rotary.at(positions, self.config.head_dim, self.config.rope_theta)

    def _fuse(self, target_hidden: Tensor) -> Tensor:
        """[N, T, K * D] -> [N, T, D]: one projection of the target's states, shared by all layers."""
        return self.hidden_norm(self.fc(target_hidden))

    def _for_each_layer(self, masks: Sequence[_M]) -> list[_M]:
        """Of one value for each of config.attention_types, each layer's."""
        if len(masks) != len(self._attention_types):
            raise ValueError(f"{len(masks)} masks, one each is needed for {', '.join(self._attention_types)}")
        return [masks[kind] for kind in self._layer_masks]

    def forward(
        self, block_embeddings: Tensor, target_hidden: Tensor, anchors: Tensor, *masks: Tensor | BlockRanges
    ) -> Tensor:
        """Draft all blocks of a batch at once: the final hidden states [N, A * (B - 1), D] of the slots from 1 on.

        Slot 0 is the anchor, which is known: the last layer needs its keys and values, and nothing after them.

        `block_embeddings` [N, A * B, D]: the target's embeddings of [anchor, mask, ...] for every slot.
        `target_hidden` [N, S, K * D]: the target's states at config.target_layer_ids, concatenated.
        `anchors` long [N, A]: slot k of a block is at position anchor + k, context token t at t.
        `masks`: one for each of config.attention_types, in that order: bool [N, 1, A * B, S + A * B] for
        scaled-dot-product attention (any device), or `BlockRanges` of the same meaning for `block_attention` (CUDA).
        Compiles with fullgraph=True and static shapes.
        """
        rows, context_length = target_hidden.shape[:2]
        size = self.config.block_size
        slot = torch.arange(size, device=anchors.device)
        rotary = self._rotary((anchors[:, :, None] + slot).view(rows, -1))
        context_rotary = self._rotary(torch.arange(context_length, device=anchors.device)[None])
        fused = self._fuse(target_hidden)
        block = block_embeddings
        for layer, mask in zip(self.layers, self._for_each_layer(masks), strict=True):
            assert isinstance(layer, _Layer)
            context = layer.self_attn.context(fused, context_rotary)
            block = layer(block, context, rotary, mask, size if layer is self.layers[-1] else None)
        return self.norm(block)

    def draft(self, block_embeddings: Tensor, new_target_hidden: Tensor, start: int, cache: DrafterCache) -> Tensor:
        """Draft one block at `start` while decoding: its final hidden states [1, B, D].

        `block_embeddings` [1, B, D] as in `forward`; `new_target_hidden` [1, T_new, K * D]: the target's
        states at the positions committed since the last call. They enter `cache`, which then ends at
        `start`; the block's own keys and values do not. Any B up to the trained one may be drafted.
        Raises ValueError where cache and new states do not end at `start`.
        """
        first, new = cache.length, new_target_hidden.shape[1]
        if first + new != start:
            raise ValueError(
                f"the block starts at {start}, but {first} cached and {new} new context positions end at "
                f"{first + new}: pass the target's states of exactly the positions committed since"
            )
        device = block_embeddings.device
        rotary = self._rotary(torch.arange(start, start + block_embeddings.shape[1], device=device)[None])
        new_rotary = self._rotary(torch.arange(first, start, device=device)[None])
        fused = self._fuse(new_target_hidden)
        block, grown = block_embeddings, []
        masks = self._for_each_layer([self._draft_mask(each, block, start) for each in self._attention_types])
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            keys, values = layer.self_attn.context(fused, new_rotary)
            if cache.layers:
                old_keys, old_values = cache.layers[index]
                keys, values = torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)
            grown.append((keys, values))
            block = layer(block, (keys, values), rotary, masks[index])
        cache.layers = grown
        return self.norm(block)

    def _draft_mask(self, attention_type: str, block: Tensor, start: int) -> Tensor | None:
        """What layers of that type see of `start` context positions and the block; None: everything."""
        window = self.config.window_of(attention_type)
        if window is None:
            return None
        limits = torch.full((1, 1), start, device=block.device)
        return dense_mask_of(limits, start, block.shape[1], window)
