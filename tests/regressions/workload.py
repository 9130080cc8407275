"""The smallest real workload: a random target written to disk, prompts, and rows that the trainer itself prepared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.regressions.harness import Run
from tests.trainer.tiny_target import build_tiny_target, write_prompts

Json = dict[str, Any]

_PREPARE_S = 300
_ON_A_CPU: Json = {
    "require_cuda": False,
    "dtype": "float32",
    "target_dtype": "float32",
    "strategy": "eager",
    "block_size": 4,
    "anchors": 4,
    "buckets": [32],
    "canary_steps": 2,
}
# three steps, since memory is compared after the first
_ON_CUDA: Json = {
    "require_cuda": True,
    "dtype": "bfloat16",
    "target_dtype": "bfloat16",
    "strategy": "reduce-overhead",
    "block_size": 8,
    "anchors": 16,
    "buckets": [128],
    "canary_steps": 3,
}


def prepared_settings(run: Run, root: Path, folder: Path, *, cuda: bool) -> Json:
    """Settings for two drafter threads, below the empty `folder`; `root` is a release without a fault."""
    shapes, hidden_size = (_ON_CUDA, 256) if cuda else (_ON_A_CPU, 32)
    (folder / "prepared").mkdir(parents=True)
    settings = {
        "contract": 1,
        "workload": {
            "target": str(build_tiny_target(folder / "target", hidden_size=hidden_size)),
            "mask_token": "<reserved_0>",
            "drafter_threads": 2,
            "draft_layers": 1,
            "rehearsal_steps": 1,
            "canary_timeout_s": 300,
            # several canaries run side by side
            "throughput_check": False,
            **shapes,
        },
        "training": {
            "steps": 4,
            "prompts": str(write_prompts(folder / "prompts.jsonl", 12)),
            "prompt_count": 12,
            "answer_tokens": 16,
            "evaluation_prompts": 1,
            "evaluation_tokens": 4,
        },
        # compiled code is shared between the canaries
        "cache": str(folder / "cache"),
    }
    file, log = folder / "prepare.json", folder / "prepare.txt"
    file.write_text(json.dumps(settings))
    code = run(root, ["prepare", "--settings", str(file), "--out", str(folder / "prepared")], log, _PREPARE_S)
    if code != 0:
        raise RuntimeError(f"the data cannot be prepared (exit code {code}):\n{log.read_text()}")
    return {**settings, "prepared": str(folder / "prepared")}
