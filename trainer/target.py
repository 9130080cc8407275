"""The frozen target model: hidden states for training, and the decode protocol of speculative decoding.

"After layer i" is what transformers calls `hidden_states[i + 1]` (docs: dflash reference, section 1.1): the output of
decoder layer i, except for the very last layer, where it is the final norm's output.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from trainer.data import Rows
from trainer.errors import InputError
from trainer.spread import spread_layers
from trainer.target_files import check_target_path, load_config, target_folder
from trainer.transfer import send

_WHERE = "workload.target"


def family_problem(model_type: str) -> InputError:
    """The refusal of a model family whose layers or embedding this trainer does not know."""
    return InputError(
        f"the model family {model_type!r} has no plain decoder stack (model.layers, model.embed_tokens)",
        _WHERE,
        "use a Llama- or Qwen3-like causal language model",
    )


class Target:
    """A causal language model that is only read. Safe for several threads at once (captures are per thread)."""

    def __init__(self, model: nn.Module, tokenizer: Any, layer_ids: Sequence[int]) -> None:
        body = getattr(model, "model", None)
        layers, embedding = getattr(body, "layers", None), getattr(body, "embed_tokens", None)
        self.config: Any = model.config
        # a subclass of Embedding may scale its output, which a shared weight alone would not show
        if (
            not isinstance(body, nn.Module)
            or not isinstance(layers, nn.ModuleList)
            or type(embedding) is not nn.Embedding
        ):
            raise family_problem(getattr(self.config, "model_type", type(model).__name__))
        if not layer_ids or max(layer_ids) >= len(layers) or min(layer_ids) < 0:
            raise InputError(
                f"target layers {list(layer_ids)} of a target with {len(layers)} layers",
                "workload.target_layers",
                f"give ids from 0 to {len(layers) - 1}",
            )
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.layer_ids = tuple(layer_ids)
        self._captured = threading.local()
        self._final_norm_id = len(layers) - 1
        for index in set(self.layer_ids) - {self._final_norm_id}:
            layers[index].register_forward_hook(self._hook(index))
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._mask_hook(index), with_kwargs=True)
        self._prefix = _first_layers(body, max(self.layer_ids) + 1)
        # transformers renamed the argument in version 5
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    @classmethod
    def load(
        cls,
        path: Path,
        devices: Sequence[torch.device],
        dtype: torch.dtype,
        layer_ids: Sequence[int],
        cache: Path,
    ) -> Target:
        """Load a transformers folder or a GGUF file (converted once below `cache`). Raises `InputError`.

        With several `devices` its layers are spread over them (`spread.spread_layers`). Switches cuDNN's attention off
        in the whole process.
        """
        check_target_path(path, _WHERE)
        folder = target_folder(path, cache)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # it plans for each new shape, which takes longer than the attention, and generated text has one a token
        torch.backends.cuda.enable_cudnn_sdp(False)
        if len(devices) == 1:
            return cls(model.to(devices[0]), tokenizer, layer_ids)
        target = cls(model, tokenizer, layer_ids)
        spread_layers(model.model, devices)
        model.lm_head.to(devices[0])
        return target

    def _hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        # not `self`, which holds the module that holds the hook: without the collector the weights would stay for ever
        captured = self._captured

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            wanted: dict[int, Tensor] | None = getattr(captured, "states", None)
            if wanted is not None:
                wanted[index] = output[0] if isinstance(output, tuple) else output

        return keep

    def _mask_hook(self, index: int) -> Callable[[nn.Module, Any, dict[str, Any]], Any]:
        captured = self._captured

        def hand(_module: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
            masks: dict[int, Any] | None = getattr(captured, "masks", None)
            if masks is None or "attention_mask" not in named:
                return None
            return inputs, {**named, "attention_mask": masks.setdefault(index, named["attention_mask"])}

        return hand

    @contextlib.contextmanager
    def kept_masks(self, kept: dict[int, Any]) -> Iterator[None]:
        """In this thread, layers get the attention masks that are in `kept`; the first forward fills it.

        For forwards of one batch shape. transformers looks at its masks on the host to see whether a faster kernel will
        do, and during a capture it cannot look (5.17 `masking_utils`: `is_tracing`).
        """
        self._captured.masks = kept
        try:
            yield
        finally:
            self._captured.masks = None

    def _run(self, call: Callable[[], Any]) -> tuple[dict[int, Tensor], Any]:
        states: dict[int, Tensor] = {}
        self._captured.states = states
        try:
            return states, call()
        finally:
            self._captured.states = None

    def _join(self, states: dict[int, Tensor], last: Tensor | None) -> Tensor:
        if last is not None:
            states[self._final_norm_id] = last
        # layers of a target that is spread over GPUs end elsewhere
        return torch.cat([states[index].to(self.device, non_blocking=True) for index in self.layer_ids], dim=-1)

    def features_of(self, rows: Rows) -> Tensor:
        """`features` of a padded batch that lies on the CPU, on this target's device."""
        return self.features(send(rows.input_ids, self.device), send(rows.lengths, self.device))

    @torch.no_grad()
    def features(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Hidden states after the chosen layers, [N, S, K*D], zero at and after each row's length.

        `input_ids` is [N, S] padded on the right, `lengths` [N]. Causal attention keeps padding from real tokens, so
        no mask is needed. Layers above the last chosen one are not run, and no logits are computed.
        """
        states, output = self._run(lambda: self._prefix(input_ids=input_ids, use_cache=False))
        last = output.last_hidden_state if self._final_norm_id in self.layer_ids else None
        joined = self._join(states, last)
        real = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths.to(input_ids.device)[:, None]
        return joined * real[..., None]

    @torch.no_grad()
    def forward_with_features(self, input_ids: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """Run [1, T] new tokens on top of `cache`: features [1, T, K*D] and logits [1, T, V]; the cache grows by T."""
        arguments = {"input_ids": input_ids, "use_cache": True, self._cache_argument: cache}
        wants_last = self._final_norm_id in self.layer_ids
        states, output = self._run(lambda: self.model.model(**arguments))
        last = output.last_hidden_state
        logits: Tensor = self.model.lm_head(last)
        return self._join(states, last if wants_last else None), logits

    def new_cache(self) -> Any:
        """An empty key-value cache."""
        return transformers.DynamicCache(config=self.config)

    def crop(self, cache: Any, length: int) -> None:
        """Keep the first `length` positions of the cache."""
        extra = cache.get_seq_length() - length
        if extra > 0:
            # transformers 5 takes only a number of tokens to remove, written as a negative one
            cache.crop(-extra)

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, [..., D]."""
        return nn.functional.embedding(ids, self.embed_weight)

    @property
    def embed_weight(self) -> Tensor:
        """[V, D], frozen."""
        weight: Tensor = self.model.model.embed_tokens.weight
        return weight

    @property
    def head_weight(self) -> Tensor:
        """[V, D], frozen; the same memory as `embed_weight` where the target ties them."""
        weight: Tensor = self.model.lm_head.weight
        return weight

    @property
    def device(self) -> torch.device:
        """Where the weights lie; of a target over several, the first: tokens go in and hidden states come out there."""
        return self.embed_weight.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All that it lies on, `device` first."""
        return tuple(dict.fromkeys([self.device, *(each.device for each in self.model.parameters())]))

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return eos_ids(self.model.generation_config, self.tokenizer)


def eos_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """End tokens of the generation configuration and of the tokenizer together."""
    declared = getattr(generation_config, "eos_token_id", None)
    several = declared if isinstance(declared, list | tuple) else [declared]
    return frozenset(int(each) for each in (*several, tokenizer.eos_token_id) if each is not None)


def declared_ends(path: Path, cache: Path, tokenizer: Any) -> frozenset[int]:
    """The end tokens of a target whose weights are not loaded."""
    folder = target_folder(path, cache)
    if (folder / "generation_config.json").is_file():
        return eos_ids(transformers.GenerationConfig.from_pretrained(folder), tokenizer)
    return eos_ids(load_config(path, cache), tokenizer)


def _first_layers(body: nn.Module, count: int) -> nn.Module:
    """A view of the decoder that shares every weight and hook and ends after `count` layers."""
    view = copy.copy(body)
    view._modules = dict(body._modules)
    view._modules["layers"] = nn.ModuleList(list(body.get_submodule("layers").children())[:count])
    return view
