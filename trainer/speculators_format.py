"""The `config.json` of the speculators format, from a serving config and back.

Keys as the speculators package 0.9.0 has them (`SpeculatorModelConfig`, `DFlashSpeculatorConfig`, its converter from
the z-lab layout), and as vLLM reads them (`transformers_utils/configs/speculators`: `base.py`, `algos.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.serving_layout import CheckpointError, check_config

SPECULATORS_VERSION = "0.9.0"
"""The package whose format this is; a config names it, and a reader may ask."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

# what stands elsewhere in this format, or follows from it
_ELSEWHERE = ("architectures", "block_size", "num_target_layers", "dflash_config")
_ORIGIN = "sliding_window_origin"


def speculators_config(config: Mapping[str, Any], verifier: str, architectures: Sequence[str]) -> dict[str, Any]:
    """The speculators config of a drafter with this serving config.

    `verifier` is where a reader finds the target (a folder, or a name on the Hugging Face Hub), `architectures` are its
    own. Layer ids are one more than z-lab's: "before layer i + 1" is "after layer i".
    """
    dflash = config["dflash_config"]
    whole: dict[str, Any] = {
        "architectures": config["architectures"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in dflash["target_layer_ids"]],
        "block_size": config["block_size"],
        "draft_vocab_size": config["vocab_size"],
        "dtype": config["dtype"],
        "mask_token_id": dflash["mask_token_id"],
        # the anchor is the target's own token: only masks predict
        "sample_from_anchor": False,
        "sliding_window_non_causal": "is_causal" in config,
        "target_hidden_size": config["hidden_size"],
        # embedding and head are both stored
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **{key: value for key, value in config.items() if key not in _ELSEWHERE},
            # transformers 5 and vLLM read this one, transformers 4 rope_theta
            "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        },
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config["block_size"] - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
    }
    if _ORIGIN in dflash:
        whole[_ORIGIN] = dflash[_ORIGIN]
    return whole


def serving_config(whole: Mapping[str, Any], num_target_layers: int, where: str) -> dict[str, Any]:
    """The serving config that a speculators config stands for, put together as vLLM does.

    The format does not say how many layers the target has. Raises CheckpointError for what is no DFlash drafter, and
    where its own parts contradict each other.
    """
    try:
        layers = dict(whole["transformer_layer_config"])
        methods = whole["speculators_config"]["proposal_methods"]
        rope = layers.pop("rope_parameters")
        found = {
            **layers,
            "architectures": ["DFlashDraftModel"],
            "block_size": whole["block_size"],
            "num_target_layers": num_target_layers,
            "dflash_config": {
                "mask_token_id": whole["mask_token_id"],
                "target_layer_ids": [layer - 1 for layer in whole["aux_hidden_state_layer_ids"]],
                **({"causal": layers["is_causal"]} if "is_causal" in layers else {}),
                **({_ORIGIN: whole[_ORIGIN]} if _ORIGIN in whole else {}),
            },
        }
        for name, value, wanted in (
            ("speculators_model_type", whole["speculators_model_type"], "dflash"),
            ("speculators_config.algorithm", whole["speculators_config"]["algorithm"], "dflash"),
            ("speculative_tokens", methods[0]["speculative_tokens"], whole["block_size"] - 1),
            ("sample_from_anchor", whole["sample_from_anchor"], False),
            ("draft_vocab_size", whole["draft_vocab_size"], layers["vocab_size"]),
            ("target_hidden_size", whole["target_hidden_size"], layers["hidden_size"]),
            ("sliding_window_non_causal", whole["sliding_window_non_causal"], "is_causal" in layers),
            ("rope_parameters", rope, {"rope_type": "default", "rope_theta": layers["rope_theta"]}),
            ("dtype", whole["dtype"], layers["dtype"]),
        ):
            if value != wanted:
                raise CheckpointError(f"{name} is {value}", where, f"{wanted} is needed")
    except (KeyError, TypeError, IndexError) as wrong:
        raise CheckpointError(f"{type(wrong).__name__}: {wrong}", where, "a config of this format is needed") from None
    check_config(found, where)
    return found
