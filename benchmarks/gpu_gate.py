"""The canary at a real run's shape, and that it fails there: `python benchmarks/gpu_gate.py NAME`.

A random target of Qwen3-8B's widths with the fewest layers that five default target layers need, rows of random tokens,
and one drafter (5 layers, block 16, 512 anchors, 3,072 tokens, batch 1, bfloat16, whole-step): the trainer's own
canary, then the same in 8-bit floats (`linear_precision: fp8`), then one step of each with a gradient that forgets the
slots' weights, which must stop it. (An error of 1% would not: in bfloat16 no tolerance is below 6 roundings, 4.7%.)
Writes `results/NAME/gate.md`, `gate.json` and `claim.json`. Without a GPU it runs small, to try the script, and makes
no claim.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claims import ROOT
from gpu_steps import keep_claim

sys.path.insert(0, str(ROOT))

import datasets
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.regressions.faults import FAULTS
from tests.regressions.harness import Canary, OwnProcess, build_with, run_canary
from tests.trainer.tiny_target import SPECIAL, WORDS, save_tiny_tokenizer

WRONG = next(fault for fault in FAULTS if fault.name == "gradient-forgets-the-weights")
SOURCES = ["trainer", WRONG.patch.relative_to(ROOT).as_posix()]
DRAFT_LAYERS = 5
TARGET_LAYERS = 8
"""The default target layers are the second to the third-to-last."""
ROWS = 8
LOOK_S = 0.1


@dataclass(frozen=True)
class Shape:
    """The target's widths, and what of the workload depends on the machine."""

    hidden: int
    ffn: int
    heads: int
    key_heads: int
    head: int
    vocabulary: int
    tokens: int
    device: str
    workload: dict[str, Any]


LARGE = Shape(
    4096, 12288, 32, 8, 128, 151936, 3072, "cuda:0",
    {
        "require_cuda": True, "dtype": "bfloat16", "target_dtype": "bfloat16", "strategy": "whole-step",
        "block_size": 16, "anchors": 512,
    },
)  # fmt: skip
SMALL = Shape(
    32, 64, 4, 2, 8, 96, 32, "cpu",
    {
        "require_cuda": False, "dtype": "float32", "target_dtype": "float32", "strategy": "eager",
        "block_size": 4, "anchors": 4,
    },
)  # fmt: skip


def main() -> None:
    """Exits with 1 if the canary did not pass, or the broken trainer's was not stopped by its gradients."""
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        settings = _settings(LARGE if cuda else SMALL, work)
        narrow = _with(settings, linear_precision="fp8")
        right = [_canary("as it is", [], settings, work), _canary("as it is, fp8", [], narrow, work)]
        wrong = [
            _canary(WRONG.name, [WRONG.patch], _with(settings, canary_steps=1), work),
            _canary(f"{WRONG.name}, fp8", [WRONG.patch], _with(narrow, canary_steps=1), work),
        ]
    table = "\n".join(_table([*right, *wrong]))
    print(table)
    if cuda:
        keep_claim(sys.argv[1], "gate", table, {"canaries": [*right, *wrong]}, SOURCES)
    noticed = [any(check["id"] == "gradients" for check in each["failed"]) for each in wrong]
    good = all(each["exit"] == 0 for each in right) and all(each["exit"] != 0 for each in wrong) and all(noticed)
    sys.exit(0 if good else 1)


def _with(settings: dict[str, Any], **workload: object) -> dict[str, Any]:
    return {**settings, "workload": {**settings["workload"], **workload}}


def _settings(shape: Shape, folder: Path) -> dict[str, Any]:
    """Of the canary; target and rows are written below `folder`."""
    return {
        "contract": 1,
        "workload": {
            "target": str(_target(shape, folder / "target")),
            "mask_token": "<reserved_0>",
            "drafter_devices": [shape.device],
            "target_devices": [shape.device],
            "draft_layers": DRAFT_LAYERS,
            "buckets": [shape.tokens],
            # memory is compared after the first
            "canary_steps": 3,
            "rehearsal_steps": 1,
            "canary_timeout_s": 400,
            # without a history it would say nothing, for another warm-up
            "throughput_check": False,
            **shape.workload,
        },
        "training": {
            "steps": 4, "data": str(_rows(shape, folder / "rows")), "evaluation_prompts": 1, "evaluation_tokens": 4,
        },
        "cache": str(folder / "cache"),
    }  # fmt: skip


def _target(shape: Shape, folder: Path) -> Path:
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=SPECIAL.index("<s>"),
        eos_token_id=SPECIAL.index("</s>"),
    )
    torch.manual_seed(0)
    with torch.device(shape.device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    del model
    if shape.device != "cpu":
        torch.cuda.empty_cache()
    return folder


def _rows(shape: Shape, folder: Path) -> Path:
    """Tokens that are none of the tokenizer's, so the mask token is not among them; the first quarter is a prompt."""
    generator = torch.Generator().manual_seed(1)
    first = len(SPECIAL) + len(WORDS)
    ids = torch.randint(first, shape.vocabulary, (ROWS, shape.tokens), generator=generator)
    mask = [int(place >= shape.tokens // 4) for place in range(shape.tokens)]
    datasets.Dataset.from_dict({"input_ids": ids.tolist(), "loss_mask": [mask] * ROWS}).save_to_disk(folder)
    return folder


def _canary(name: str, patches: list[Path], settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    work = folder / name
    release = build_with(patches, work / "tree")
    (work / "canary").mkdir()
    with PeakMemory() as peak:
        canary = run_canary(OwnProcess(sorted(os.sched_getaffinity(0))), release.tree, settings, work / "canary")
    if canary.evidence is None:
        print(canary.log, file=sys.stderr)
    return {
        "trainer": name,
        "exit": canary.code,
        "summary": canary.message,
        "seconds": round(canary.seconds, 1),
        "parts": {} if canary.evidence is None else canary.evidence["figures"],
        "peak_mib": peak.mib,
        "failed": canary.of("fail"),
        "passed": _worst_of_each(canary),
        "broke": canary.broke,
    }


def _worst_of_each(canary: Canary) -> list[dict[str, Any]]:
    """Of the checks with a tolerance that passed, the worst of each kind."""
    found: dict[str, dict[str, Any]] = {}
    for each in canary.of("pass"):
        figures = each["figures"]
        if "tolerance" not in figures:
            continue
        share = figures["worst"] / figures["tolerance"]
        if each["id"] not in found or share > found[each["id"]]["share"]:
            found[each["id"]] = {"id": each["id"], "share": round(share, 3), "summary": each["summary"]}
    return list(found.values())


class PeakMemory:
    """The most memory of the first GPU that all processes took while it was entered, beyond what they took before.

    `mib` is None without a GPU. It looks ten times a second: what is shorter may be missed.
    """

    def __init__(self) -> None:
        self.mib: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> PeakMemory:
        if torch.cuda.is_available():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        before, _ = torch.cuda.mem_get_info(0)
        while not self._done.wait(LOOK_S):
            free, _ = torch.cuda.mem_get_info(0)
            self.mib = max(self.mib or 0, (before - free) >> 20)


def _table(canaries: list[dict[str, Any]]) -> list[str]:
    lines = ["| trainer | exit | summary | s | of these | peak MiB |", "|---|---|---|---|---|---|"]
    for each in canaries:
        parts = ", ".join(
            f"{part.removesuffix('_seconds')} {seconds:.1f}"
            for part, seconds in each["parts"].items()
            if part != "seconds"
        )
        peak = "" if each["peak_mib"] is None else each["peak_mib"]
        lines.append(
            f"| {each['trainer']} | {each['exit']} | {each['summary']} | {each['seconds']} | {parts} | {peak} |"
        )
    for each in canaries:
        lines += ["", f"{each['trainer']}:", ""]
        lines += [f"* {one['id']} failed: {one['summary'].splitlines()[-1]}" for one in each["failed"]]
        if not each["failed"]:
            lines += [f"* {one['id']}, {one['share']:.2f} of the tolerance: {one['summary']}" for one in each["passed"]]
    return lines


if __name__ == "__main__":
    main()
