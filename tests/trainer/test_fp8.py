"""Linear layers and head in 8-bit floats: against the arithmetic written out, compiled, and in the canary."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.drafting import COMPILED_CONFIG, generator
from trainer import fp8, fp8_rules
from trainer.anchors import sample_anchors
from trainer.canary import gate, run_canary
from trainer.canary.evidence import Outcome
from trainer.canary.measure import relative
from trainer.canary.noise import Noise
from trainer.canary.perturbation import perturbed_gradient
from trainer.canary.reference import Eager, Order, StepReference
from trainer.check import check
from trainer.compile import STRATEGIES
from trainer.dflash_model import DFlashDrafter
from trainer.fp8 import NarrowHead
from trainer.loss import block_labels, block_loss
from trainer.optimizer import ClippedAdamW
from trainer.parts import Parts
from trainer.placement import Placement
from trainer.replica import DrafterReplica
from trainer.settings import settings_from_json
from trainer.step import Batch, DrafterStep, FrozenHead, StepStats

pytestmark = pytest.mark.torch

Json = dict[str, Any]
Ready = Callable[..., Json]


def e4m3(value: float) -> float:
    """The nearest number of 4 bits of exponent and 3 of mantissa, ties to even, from the definition."""
    exponent = -6
    while abs(value) >= 2.0 ** (exponent + 1) and exponent < 8:
        exponent += 1
    step = 2.0 ** (exponent - 3)
    # Python's round is to even
    return max(-448.0, min(448.0, round(value / step) * step))


def by_the_book(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's numbers, and its scale, in float64."""
    scale = (matrix.abs().amax(dim=1, keepdim=True).float() / 448).double()
    rounded = [[e4m3(float(torch.tensor(each).float())) for each in row] for row in (matrix / scale).tolist()]
    return torch.tensor(rounded, dtype=torch.float64), scale


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 9), wide=st.sampled_from([1e-12, 1.0, 1e12]))
def test_a_linear_layer_is_the_product_of_what_is_quantised(seed: int, rows: int, wide: float) -> None:
    drawn = generator(seed)
    inputs = (torch.randn((2, rows, 16), generator=drawn) * wide).requires_grad_()
    weight = torch.randn((32, 16), generator=drawn).requires_grad_()
    gradient = torch.randn((2, rows, 32), generator=drawn)
    found = fp8.linear(inputs, weight)
    to_inputs, to_weight = torch.autograd.grad(found, [inputs, weight], gradient)
    flat, turned = inputs.detach().double().flatten(0, 1), gradient.double().flatten(0, 1)
    (numbers, scale), (of_weight, weight_scale) = by_the_book(flat), by_the_book(weight.detach().double())
    right = (numbers * scale) @ (of_weight * weight_scale).t()
    assert relative(found.flatten(0, 1), right) < 1e-6
    of_gradient, gradient_scale = by_the_book(turned * weight_scale.t())
    assert relative(to_inputs.flatten(0, 1), (of_gradient * gradient_scale) @ of_weight) < 1e-6
    assert relative(to_weight, turned.t() @ flat) < 1e-6


def test_rows_of_zeros_stay_so_and_what_is_no_number_is_seen() -> None:
    weight = torch.randn((16, 16), generator=generator(1))
    rows = torch.randn((4, 16), generator=generator(2))
    rows[1] = 0.0
    rows[2, 3] = float("inf")
    found = fp8.linear(rows, weight)
    assert not found[1].any()
    assert bool(found[2].isnan().all())
    assert bool(found[[0, 3]].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_as_eager(dtype: torch.dtype) -> None:
    rows = torch.randn((3, 48, 32), generator=generator(1)).to(dtype).requires_grad_()
    weight = torch.randn((64, 32), generator=generator(2)).to(dtype).requires_grad_()

    def loss(rows: Tensor, weight: Tensor) -> Tensor:
        return fp8.linear(rows, weight).float().square().sum()

    eager = torch.autograd.grad(loss(rows, weight), [rows, weight])
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(rows, weight), [rows, weight])
    for found, wanted in zip(compiled, eager, strict=True):
        assert bool(wanted.any())
        assert relative(found, wanted) < 1e-2


def head_by_the_book(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and their gradient by `hidden`, from quantised states, head and probabilities, in float64."""
    (numbers, scale) = by_the_book(hidden.double())
    of_head = (weight.abs().amax() / 448).double()
    words = (
        torch.tensor([[e4m3(each) for each in row] for row in (weight / of_head.float()).tolist()]).double() * of_head
    )
    log_shares = ((numbers * scale) @ words.t()).log_softmax(dim=1)
    # e5m2: as e4m3 with a bit more of exponent, one less of mantissa
    exponent = (log_shares.exp() * 2**15).log2().floor()
    step = 2.0 ** (exponent - 2)
    shares = (log_shares.exp() * 2**15 / step).round() * step / 2**15
    index = torch.arange(len(labels))
    shares[index, labels] = log_shares[index, labels].exp() - 1
    return -log_shares[index, labels], shares @ words


@pytest.mark.parametrize("sharp", [0.02, 3.0])
def test_the_head_is_the_product_of_what_is_quantised(sharp: float) -> None:
    drawn = generator(5)
    hidden = torch.randn((2, 3 * 3, 16), generator=drawn).requires_grad_()
    weight = torch.randn((48, 16), generator=drawn) * sharp
    labels = torch.randint(0, 48, (2, 3, 4), generator=drawn)
    weights = torch.rand((2, 3, 4), generator=drawn)
    weights[:, :, 0] = 0
    loss = block_loss(hidden, NarrowHead.of(weight), labels, weights, chunk=7)
    (gradient,) = torch.autograd.grad(loss.loss_sum, hidden)
    losses, by_row = head_by_the_book(hidden.detach().flatten(0, 1), weight, labels[:, :, 1:].flatten())
    counts = weights[:, :, 1:].flatten().double()
    assert float(loss.loss_sum.detach()) == pytest.approx(float((losses * counts).sum()), rel=1e-6)
    assert relative(gradient.flatten(0, 1), by_row * counts[:, None]) < 1e-5


def test_a_confident_row_keeps_the_digits_of_its_gradient() -> None:
    weight = torch.eye(16)
    hidden = (torch.eye(16)[:1] * 12.0)[None].requires_grad_()
    labels, weights = torch.zeros((1, 1, 2), dtype=torch.long), torch.tensor([[[0.0, 1.0]]])
    loss = block_loss(hidden, NarrowHead.of(weight), labels, weights).loss_sum
    (gradient,) = torch.autograd.grad(loss, hidden)
    wanted = float(torch.expm1(-loss.detach()))
    assert -1e-3 < wanted < 0
    assert float(gradient[0, 0, 0]) == pytest.approx(wanted, rel=1e-4)


CONFIG = replace(COMPILED_CONFIG, vocab_size=512)
TOKENS, SLOTS = 64, 4


def stepped(strategy: str, dtype: torch.dtype, seed: int) -> tuple[Json, FrozenHead, Batch, dict[str, Tensor]]:
    """Loss sum and gradients of one step, with what they are of."""
    drawn = generator(seed)
    drafter = DFlashDrafter(CONFIG, dtype=dtype, generator=drawn, narrow=True).requires_grad_(True)
    weight = (torch.randn((512, 64), generator=drawn) * 0.05).to(dtype)
    frozen = FrozenHead(weight, weight, NarrowHead.of(weight))
    ids = torch.randint(0, 500, (1, TOKENS), generator=drawn)
    lengths, mask = torch.full((1,), TOKENS), torch.ones((1, TOKENS), dtype=torch.bool)
    anchors = sample_anchors(mask, lengths, SLOTS, drawn)
    labels, weights = block_labels(ids, mask, lengths, anchors, 16, 7.0)
    features = torch.randn((1, TOKENS, 128), generator=drawn).to(dtype)
    batch = Batch((0,), ids, lengths, features, anchors, labels, weights, float(weights.sum()))
    before = {name: each.detach().clone() for name, each in drafter.named_parameters()}
    optimizer = ClippedAdamW(list(drafter.named_parameters()), betas=(0.9, 0.95), weight_decay=0.0, clip=1.0)
    step = DrafterStep(
        drafter, frozen, optimizer, STRATEGIES[strategy], buckets=[TOKENS], rows=1, slots=SLOTS, accumulation=1,
        replicas=1, name=f"fp8_{strategy}_{seed}",
    )  # fmt: skip
    stats = step.accumulate(batch, torch.tensor(1 / batch.weight_sum), first=True, last=True)
    gradients = dict(zip(before, [each.clone() for each in step.gradients], strict=True))
    return {"loss": float(stats.loss_sum), "gradients": gradients}, frozen, batch, before


@pytest.mark.parametrize("strategy", ["eager", "default"])
def test_a_whole_step_is_the_references(strategy: str) -> None:
    found, frozen, batch, weights = stepped(strategy, torch.float32, seed=0)
    truth = Eager(CONFIG, frozen, torch.float64, "dflash", narrow=True).step(weights, [batch], 1 / batch.weight_sum)
    # compiled code sums in another order: a number between two 8-bit ones may become the other one
    room = 1e-5 if strategy == "eager" else 3e-2
    assert found["loss"] == pytest.approx(truth.loss_sums[0], rel=room)
    for name, right in truth.gradient.items():
        assert relative(found["gradients"][name], right) < room, name


def test_groups_of_blocks_do_not_change_the_reference() -> None:
    _, frozen, batch, weights = stepped("eager", torch.float32, seed=1)
    eager = Eager(CONFIG, frozen, torch.float64, "dflash", narrow=True)
    first, other = (
        eager.step(weights, [batch], 1 / batch.weight_sum, each) for each in (Order(), Order(group=1, backwards=True))
    )
    for name, right in first.gradient.items():
        assert relative(other.gradient[name], right) < 1e-12, name


def test_the_gradient_is_near_that_of_exact_products() -> None:
    found, frozen, batch, weights = stepped("eager", torch.float32, seed=3)
    truth = Eager(CONFIG, frozen, torch.float64, "dflash").step(weights, [batch], 1 / batch.weight_sum)
    assert found["loss"] == pytest.approx(truth.loss_sums[0], rel=1e-2)
    flat = [
        torch.cat([each[name].double().flatten() for name in truth.gradient])
        for each in (found["gradients"], truth.gradient)
    ]
    assert float(torch.cosine_similarity(*flat, dim=0)) > 0.98
    assert relative(found["gradients"]["fc.weight"], truth.gradient["fc.weight"]) > 1e-4


def evidence_of(settings: Json, out: Path) -> Json:
    out.mkdir()
    run_canary(settings_from_json(settings), out)
    evidence: Json = json.loads((out / "evidence.json").read_text())
    return evidence


@pytest.mark.parametrize("shape", [{"dtype": "float32", "loss_type": "dpace"}, {"dtype": "bfloat16"}])
def test_the_canary_passes(ready: Ready, tmp_path: Path, shape: Json) -> None:
    settings = ready(**shape, linear_precision="fp8", accumulation=2, canary_steps=2, rehearsal_steps=1)
    evidence = evidence_of(settings, tmp_path / "out")
    assert evidence["outcome"] == "pass", evidence


@pytest.mark.parametrize("name", ["fc.weight", "layers.0.mlp.down_proj.weight"])
def test_the_canary_finds_a_gradient_that_is_off_by_a_hundredth(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = gate.build_replica

    def planted(parts: Parts, worker: int) -> DrafterReplica:
        replica = real(parts, worker)
        names = [each for each, _ in replica.drafter.named_parameters()]
        step = replica.step
        accumulate = step.accumulate

        def wrong(batch: Batch, normaliser: Tensor, *, first: bool, last: bool) -> StepStats:
            stats = accumulate(batch, normaliser, first=first, last=last)
            step.gradients[names.index(name)].mul_(1.01)
            return stats

        monkeypatch.setattr(step, "accumulate", wrong)
        return replica

    monkeypatch.setattr(gate, "build_replica", planted)
    evidence = evidence_of(ready(dtype="float32", linear_precision="fp8"), tmp_path / "out")
    failed = {each["id"]: each["summary"] for each in evidence["checks"] if each["outcome"] == "fail"}
    assert name in failed["gradients"]


def test_the_canary_finds_products_that_are_not_fp8(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gate.build_replica

    def planted(parts: Parts, worker: int) -> DrafterReplica:
        replica = real(parts, worker)
        for each in replica.drafter.layers.modules():
            if hasattr(each, "narrow"):
                each.narrow = False
        return replica

    monkeypatch.setattr(gate, "build_replica", planted)
    evidence = evidence_of(ready(dtype="float32", linear_precision="fp8"), tmp_path / "out")
    assert {"outputs", "gradients"} <= {each["id"] for each in evidence["checks"] if each["outcome"] == "fail"}


def off_by(share: float) -> tuple[StepReference, StepReference]:
    """A reference, and one whose gradient is `share` of its length away."""
    truth = torch.zeros(16, dtype=torch.float64)
    truth[0] = 1.0
    found = truth.clone()
    found[1] = share
    return StepReference([], [], {"norm.weight": found}), StepReference([], [], {"norm.weight": truth})


# by the dtype that 8-bit numbers come of, and what right code differs by: Qwen3-8B's drafter has 0.1 in its norms
@pytest.mark.parametrize(
    ("dtype", "narrow", "share", "allowed", "conclusive"),
    [
        (torch.bfloat16, True, 0.1, 0.3, True),
        (torch.bfloat16, False, 0.1, 0.6, False),
        (torch.float32, True, 0.1, 0.6, False),
        (torch.float32, True, 1e-3, 6e-3, True),
        # never less than that many roundings of the dtype
        (torch.bfloat16, True, 0.0, 6 * 2**-7, True),
    ],
)
def test_tolerances_stay_small_enough_to_prove_something(
    dtype: torch.dtype, narrow: bool, share: float, allowed: float, conclusive: bool
) -> None:
    found, truth = off_by(share)
    noise = Noise(dtype, narrow=narrow)
    noise.see(found, truth)
    assert noise.allowed("norm.weight") == pytest.approx(allowed, rel=0.01)
    control = perturbed_gradient(found.gradient, truth.gradient, noise, dtype)
    assert control.outcome is (Outcome.PASS if conclusive else Outcome.INCONCLUSIVE)


def test_check_refuses_a_width_that_no_gpu_multiplies(ready: Ready, tmp_path: Path) -> None:
    (problem,) = check(settings_from_json(ready(linear_precision="fp8", draft_ffn=40)), tmp_path)
    assert problem.where == "workload.linear_precision"
    assert "feed-forward size is 40" in problem.what and "multiples of 16" in problem.what
    assert not check(settings_from_json(ready(linear_precision="fp8", draft_ffn=48)), tmp_path)
    assert not check(settings_from_json(ready(draft_ffn=40)), tmp_path)


@pytest.mark.parametrize(
    ("capability", "dtype", "said"),
    [((9, 0), "bfloat16", None), ((8, 0), "bfloat16", "capability 8.9"), ((9, 0), "float32", "dtype is float32")],
)
def test_gpus_that_have_no_fp8_are_refused(
    ready: Ready, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str, said: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    work = settings_from_json(ready(linear_precision="fp8", dtype=dtype)).workload
    placement = Placement((torch.device("cuda:0"),), ((torch.device("cuda:0"),),))
    if said is None:
        fp8_rules.refuse_impossible_fp8(work, placement, CONFIG)
        return
    with pytest.raises(fp8_rules.InputError, match=said):
        fp8_rules.refuse_impossible_fp8(work, placement, CONFIG)
