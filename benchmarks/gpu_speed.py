"""How fast a drafter's step is, beside this GPU's own matrix rate, in one run: `python benchmarks/gpu_speed.py NAME`.

The Qwen3-8B-shaped drafter (5 layers, 4096, FFN 12288, 32/8 heads, vocabulary 151,936; context 3072, 512 anchors x 16)
with one and with four samples a step, and the quickstart's: samples/s, FLOP/s as a share of one large product's in the
same process, peak memory, seconds from the start to the first step (of the first case with nothing in its caches, then
with all), the kernels that take the time, and each one's gradient against eager code. AdamW with float32 masters, and
the large drafter with one sample also without, and both of it in 8-bit floats too. Writes `results/NAME/speed.md`,
`speed.json` and `claim.json`. Without a GPU it runs small, to try the script, and makes no claim.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_steps import NO_MASTERS, in_fp8, keep_claim, run_cases, without_masters

SOURCES = [
    "trainer/compile",
    "trainer/dflash_model.py",
    "trainer/block_attention.py",
    "trainer/block_kernels.py",
    "trainer/loss.py",
    "trainer/fused_cross_entropy.py",
    "trainer/fp8.py",
    "trainer/optimizer.py",
    "trainer/fused_adamw.py",
    "trainer/step.py",
]
KERNELS = 14
FP8 = {"linear_precision": "fp8"}


def cases(small: bool) -> list[dict[str, Any]]:
    """What is measured, in the table's order."""
    if small:
        tiny = {"model": "drafter-tiny", "strategy": "eager", "steps": 2, "profile": True}
        return [tiny, tiny, {**tiny, "rows": 2}, {**tiny, **NO_MASTERS}, {**tiny, **FP8}]
    large = {"model": "drafter-8b", "strategy": "whole-step", "profile": True}
    return [
        {**large, "steps": 12},
        {**large, "steps": 12},
        {**large, **NO_MASTERS, "steps": 12},
        {**large, **FP8, "steps": 12},
        {**large, **FP8, **NO_MASTERS, "steps": 12},
        {**large, "rows": 4, "steps": 4},
        {"model": "drafter-135m", "strategy": "whole-step", "rows": 4, "steps": 200, "profile": True},
    ]


def main() -> None:
    """Exits with 1 if a case failed or was not right."""
    import torch

    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        # one by one: the first compiles with nothing in its caches, and no other holds its memory
        found = run_cases(cases(small=not cuda), Path(folder), at_once=1)
    text = "\n".join(_text(found))
    print(text)
    if cuda:
        keep_claim(sys.argv[1], "speed", text, {"cases": found}, SOURCES)
    sys.exit(0 if all(each.get("right") for each in found) else 1)


def _text(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| drafter | samples a step | ms a step | samples/s | TFLOP/s | of the matrix rate | kernels, ms | peak MiB "
        "| warm-up s | worst / tolerance |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    kernels: list[str] = []
    for index, each in enumerate(found):
        case = each["case"]
        rows = case.get("rows", 1)
        again = ", again" if case in [before["case"] for before in found[:index]] else ""
        start = f"| {case['model']}{without_masters(case)}{in_fp8(case)}{again} | {rows} "
        if "failed" in each:
            lines.append(f"{start}| failed: {each['failed'].splitlines()[-1]} ||||||||")
            continue
        rate, matrix = each["flops"] * 1e3 / each["ms_a_step"], each["matrix_flops"]
        cells = [
            f"{each['ms_a_step']:.2f}",
            f"{rows * each['steps_a_second_all']:.2f}",
            f"{rate / 1e12:.0f}",
            f"{rate / matrix:.1%} of {matrix / 1e12:.0f}" if matrix else "",
            f"{each['kernels_ms']:.2f}",
            f"{max(each.get('peak_allocated_mib', [0])):.0f}",
            f"{max(each['warm_up_s']):.1f}",
            f"{each['share_of_tolerance']:.2f}",
        ]
        lines.append(f"{start}| {' | '.join(cells)} |")
        if again:
            continue
        kernels += ["", f"{case['model']}{without_masters(case)}{in_fp8(case)}, {rows} samples a step:", ""]
        kernels += [f"* {ms:.3f} ms `{name[:110]}`" for name, ms in list(each["kernel_ms"].items())[:KERNELS]]
    return [*lines, *kernels]


if __name__ == "__main__":
    main()
