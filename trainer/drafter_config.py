"""The drafter's shape, derived from its target, and the `config.json` that SGLang and vLLM read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import InputError

ARCHITECTURE = "DFlashDraftModel"
# vLLM and SGLang know the drafter's layers as Qwen3's: pre-norm, GQA, per-head q_norm and k_norm, SwiGLU
MODEL_TYPE = "qwen3"
FULL, SLIDING = "full_attention", "sliding_attention"
FROM_QUERY, FROM_ANCHOR = "query", "anchor"
WIDEST_HEAD = 256
"""What attention has kernels for (`block_attention`)."""


@dataclass(frozen=True)
class SlidingWindow:
    """What a query of a sliding layer sees: at most `size` positions of the text, and its own block.

    Public trainers disagree on two points, so both are named. `origin`: where the window ends. From the "query" it
    is as SGLang, SpecForge and NeMo AutoModel have it, and the query's own slot takes one of its places; from the
    "anchor" as speculators has it, where every slot sees the same `size` context tokens. `causal`: a query sees no
    later slot of its block (SGLang, SpecForge, speculators); else all of it (speculators'
    `sliding_window_non_causal`, vLLM's `dflash_config.causal: false`).
    """

    size: int
    origin: str = FROM_QUERY
    causal: bool = True

    @property
    def reach(self) -> int:
        """How many context positions slot 0 sees: those from anchor - reach on."""
        return self.size - 1 if self.origin == FROM_QUERY else self.size

    @property
    def step(self) -> int:
        """How much further on the context begins for each next slot: 1, or 0 where all slots see the same."""
        return 1 if self.origin == FROM_QUERY else 0


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a DFlash drafter. Widths are the target's (`fc` ends in the target's hidden size).

    `target_layer_ids` means "after layer i" of the target, 0-based: Hugging Face's `hidden_states[i + 1]`.
    `block_size` counts the anchor: a block proposes `block_size - 1` tokens. `sliding_layers` are the draft layers
    with sliding attention, all others have full attention; `window` is theirs, None where there is none.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    block_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float
    sliding_layers: tuple[int, ...] = ()
    window: SlidingWindow | None = None

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "num_target_layers",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"{getattr(self, name)} is too small", name, "at least 1 is needed")
        if self.block_size < 2:
            raise InputError(
                f"{self.block_size} is too small",
                "block_size",
                "a block is an anchor and a mask, so at least 2",
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"{self.num_attention_heads} heads do not divide among {self.num_key_value_heads} key heads",
                "num_attention_heads",
                "every key head serves the same number of query heads",
            )
        if self.head_dim % 2:
            raise InputError(f"{self.head_dim} is odd", "head_dim", "rotary positions pair its two halves")
        if self.head_dim > WIDEST_HEAD:
            raise InputError(
                f"{self.head_dim} is too wide", "head_dim", f"attention has kernels for heads up to {WIDEST_HEAD}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(
                f"{self.mask_token_id} is no token of the target",
                "mask_token_id",
                f"its vocabulary is 0 to {self.vocab_size - 1}",
            )
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.num_target_layers:
            raise InputError(
                f"{list(ids)} are no layers of the target",
                "target_layer_ids",
                f"ascending and distinct, from 0 to {self.num_target_layers - 1}",
            )
        self._check_window()

    def _check_window(self) -> None:
        sliding, window = self.sliding_layers, self.window
        if list(sliding) != sorted(set(sliding)) or (
            sliding and not 0 <= sliding[0] <= sliding[-1] < self.num_hidden_layers
        ):
            raise InputError(
                f"{list(sliding)} are no layers of the drafter",
                "sliding_layers",
                f"ascending and distinct, from 0 to {self.num_hidden_layers - 1}",
            )
        if bool(sliding) != (window is not None):
            raise InputError(
                f"the window is {window}, the sliding layers are {list(sliding)}",
                "sliding_window",
                "sliding layers need a window, and a window sliding layers",
            )
        if window is None:
            return
        # then no window ends inside a block, where engines would disagree once more
        if window.size < self.block_size:
            raise InputError(
                f"{window.size} is less than a block of {self.block_size}",
                "sliding_window",
                f"at least {self.block_size} is needed",
            )
        if window.origin not in (FROM_QUERY, FROM_ANCHOR):
            raise InputError(
                f"{window.origin!r} is no origin of a window",
                "sliding_window_origin",
                f"{FROM_QUERY!r} or {FROM_ANCHOR!r}",
            )

    @property
    def reads_last_target_layer(self) -> bool:
        """Whether a feature is the target's last layer, whose state is the final norm's output here, as in
        transformers' `hidden_states[-1]`; vLLM hands over what comes before that norm."""
        return self.target_layer_ids[-1] == self.num_target_layers - 1

    @property
    def layer_types(self) -> tuple[str, ...]:
        """`full_attention` or `sliding_attention` for each draft layer."""
        return tuple(SLIDING if layer in self.sliding_layers else FULL for layer in range(self.num_hidden_layers))

    @property
    def attention_types(self) -> tuple[str, ...]:
        """The types that occur, `full_attention` first: a forward takes one mask for each, in this order."""
        return tuple(kind for kind in (FULL, SLIDING) if kind in self.layer_types)

    def window_of(self, attention_type: str) -> SlidingWindow | None:
        """The window of layers of that type; None: they see all of the context."""
        return self.window if attention_type == SLIDING else None

    def to_json(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The serving `config.json` (the z-lab layout, which SGLang and vLLM load).

        `dtype` is torch's name of the stored tensors' type, without `torch.`.
        """
        window = self.window
        dflash: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        # only what is not the engines' default for a sliding layer: see docs/trainer.md
        override: dict[str, Any] = {}
        if window is not None and not window.causal:
            override["is_causal"] = dflash["causal"] = False
        if window is not None and window.origin != FROM_QUERY:
            dflash["sliding_window_origin"] = window.origin
        return {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": self.tie_word_embeddings,
            "layer_types": list(self.layer_types),
            "sliding_window": None if window is None else window.size,
            "use_sliding_window": window is not None,
            "max_window_layers": self.num_hidden_layers,
            "dtype": dtype,
            "torch_dtype": dtype,
            **override,
            "dflash_config": dflash,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DrafterConfig:
        """Read a serving `config.json`; what this drafter does not compute is refused.

        Raises InputError for another architecture, a missing key, rope scaling, attention bias, causal full layers,
        layer types and window that do not fit together, or a `dflash_config.block_size` that contradicts the top
        level.
        """
        if data.get("architectures") != [ARCHITECTURE] or data.get("model_type") != MODEL_TYPE:
            raise InputError(
                f"{data.get('architectures')!r} of type {data.get('model_type')!r} is another drafter",
                "architectures",
                f"only [{ARCHITECTURE!r}] of type {MODEL_TYPE!r} can be loaded",
            )
        supported: dict[str, object] = {
            "rope_scaling": None,
            "attention_bias": False,
            "hidden_act": "silu",
        }
        for key, only in supported.items():
            if data.get(key, only) != only:
                raise InputError(f"{data[key]!r} is not supported", key, f"only {only!r} is")
        dflash = data.get("dflash_config")
        if not isinstance(dflash, Mapping):
            raise InputError("missing", "dflash_config", "it names mask_token_id and target_layer_ids")
        # SGLang reads dflash_config first: two different values would mean two different drafters
        if dflash.get("block_size", data.get("block_size")) != data.get("block_size"):
            raise InputError(
                f"{dflash['block_size']} here and {data.get('block_size')} at the top level",
                "dflash_config.block_size",
                "the two must be equal",
            )
        sliding = _sliding_layers(data)
        try:
            return cls(
                hidden_size=int(data["hidden_size"]),
                intermediate_size=int(data["intermediate_size"]),
                num_hidden_layers=int(data["num_hidden_layers"]),
                num_attention_heads=int(data["num_attention_heads"]),
                num_key_value_heads=int(data["num_key_value_heads"]),
                head_dim=int(data["head_dim"]),
                rms_norm_eps=float(data["rms_norm_eps"]),
                rope_theta=float(data["rope_theta"]),
                vocab_size=int(data["vocab_size"]),
                block_size=int(data["block_size"]),
                num_target_layers=int(data["num_target_layers"]),
                target_layer_ids=tuple(int(i) for i in dflash["target_layer_ids"]),
                mask_token_id=int(dflash["mask_token_id"]),
                max_position_embeddings=int(data["max_position_embeddings"]),
                tie_word_embeddings=bool(data["tie_word_embeddings"]),
                initializer_range=float(data["initializer_range"]),
                sliding_layers=sliding,
                window=_window(data, dflash) if sliding else None,
            )
        except KeyError as missing:
            raise InputError(f"key {missing} is missing", "the drafter's config", "it is required") from None


def _sliding_layers(data: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers that `layer_types` of a serving config calls sliding. Raises InputError for a list that does not fit."""
    count = int(data.get("num_hidden_layers", 0))
    kinds = data.get("layer_types") or [FULL] * count
    if len(kinds) != count or not set(kinds) <= {FULL, SLIDING}:
        raise InputError(
            f"{kinds} for {count} layers", "layer_types", f"{FULL!r} or {SLIDING!r} for each layer is needed"
        )
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
    if bool(data.get("use_sliding_window", bool(sliding))) != bool(sliding):
        raise InputError(
            f"{data['use_sliding_window']}, and layer_types has {len(sliding)} sliding layers",
            "use_sliding_window",
            "the two must agree",
        )
    return sliding


def _window(data: Mapping[str, Any], dflash: Mapping[str, Any]) -> SlidingWindow:
    """The window of a serving config's sliding layers; causal in the block unless it says otherwise."""
    size = data.get("sliding_window")
    if not isinstance(size, int):
        raise InputError(f"{size!r} for sliding layers", "sliding_window", "give their window, in positions")
    causal = data.get("is_causal", dflash.get("causal", True))
    return SlidingWindow(size, dflash.get("sliding_window_origin", FROM_QUERY), bool(causal))


def default_layer_types(layers: int, *, sliding: bool) -> tuple[str, ...]:
    """All full without a window; with one all sliding but the last, as z-lab's releases since Qwen3.5 have it."""
    return (*[SLIDING if sliding else FULL] * (layers - 1), FULL)


def default_target_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers spread evenly from the second to the third-to-last (arXiv:2602.06036, section 5).

    One layer is the middle one. (36, 5) gives (1, 9, 17, 25, 33). Raises InputError where the target is too
    shallow for that many distinct layers.
    """
    if count < 1:
        raise InputError(f"{count} layers are wanted", "target_layers", "at least 1 is needed")
    if count == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    if last - first + 1 < count:
        raise InputError(
            f"{count} layers are wanted, and from the second to the third-to-last the target's "
            f"{num_target_layers} layers have {max(0, last - first + 1)}",
            "target_layers",
            "name the layers, or use fewer draft_layers",
        )
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def create_drafter_config(
    target_config: Any,
    *,
    draft_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    layer_types: Sequence[str] | None = None,
    window: SlidingWindow | None = None,
) -> DrafterConfig:
    """Derive a drafter from its target: same width, heads, norm epsilon, rotary base and vocabulary.

    `target_config` is a transformers config of the Llama or Qwen3 kind (4.57's `rope_theta` or 5's
    `rope_parameters`). `target_layer_ids` None takes `draft_layers` default ones; `intermediate_size` None
    takes the target's. Raises InputError for a layout without the usual attribute names, for rope
    scaling other than the default, and for values that do not fit together.
    """
    text = target_config.get_text_config() if hasattr(target_config, "get_text_config") else target_config
    family = getattr(text, "model_type", type(text).__name__)
    needed = [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
    ]
    if intermediate_size is None:
        needed.append("intermediate_size")
    missing = [name for name in needed if getattr(text, name, None) is None]
    if missing:
        raise InputError(
            f"{', '.join(missing)} missing",
            f"the target's config ({family})",
            "a target of the Llama or Qwen3 kind is needed",
        )
    layers, heads = int(text.num_hidden_layers), int(text.num_attention_heads)
    ids = default_target_layer_ids(layers, draft_layers) if target_layer_ids is None else tuple(target_layer_ids)
    kinds = default_layer_types(draft_layers, sliding=window is not None) if layer_types is None else layer_types
    if len(kinds) != draft_layers:
        raise InputError(f"{len(kinds)} types for {draft_layers} layers", "layer_types", f"give {draft_layers}")
    return DrafterConfig(
        hidden_size=int(text.hidden_size),
        intermediate_size=int(text.intermediate_size if intermediate_size is None else intermediate_size),
        num_hidden_layers=draft_layers,
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        rms_norm_eps=float(text.rms_norm_eps),
        rope_theta=_rope_theta(text, family),
        vocab_size=int(text.vocab_size),
        block_size=block_size,
        num_target_layers=layers,
        target_layer_ids=ids,
        mask_token_id=mask_token_id,
        max_position_embeddings=int(text.max_position_embeddings),
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        initializer_range=float(getattr(text, "initializer_range", 0.02)),
        sliding_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING),
        window=window,
    )


def _rope_theta(text: Any, family: str) -> float:
    """The target's rotary base; anything but plain rotary positions is refused."""
    # transformers 5 keeps all in rope_parameters; 4.57 has rope_theta beside rope_scaling
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    where = f"the target's config ({family})"
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise InputError(
            f"rope parameters of their own for {', '.join(rope)}", where, "one set for all layers is needed"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise InputError(f"rope is scaled ({kind!r})", where, "only rope of type 'default' is supported")
    rotary = rope.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", None))
    if rotary not in (None, 1, 1.0) or "mrope_section" in rope:
        raise InputError("rope turns only a part of each head", where, "plain rope over whole heads is needed")
    theta = rope.get("rope_theta", getattr(text, "rope_theta", None))
    if theta is None:
        raise InputError("rope_theta is missing", where, "a target with rotary positions is needed")
    return float(theta)
