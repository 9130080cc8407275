"""A module that has nothing to do with drafters, its training step, and the same training in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.compile import CompiledStep, Prepared, StepDefinition, StepPlan, Strategy, compiled_step
from trainer.exchange import Exchange
from trainer.optimizer import ClippedAdamW

ROWS = (4, 6)
_BETAS, _DECAY, _CLIP = (0.9, 0.95), 0.1, 0.3


def module(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Remembers each forward (BatchNorm), and has a parameter that nothing uses."""
    draw = torch.Generator().manual_seed(4)
    with torch.random.fork_rng(devices=[]):
        # no bias before BatchNorm: its gradient is rounding noise, which AdamW blows up
        made = nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 2))
    made.register_parameter("unused", nn.Parameter(torch.ones(2)))
    with torch.no_grad():
        for each in made.parameters():
            each.copy_(torch.randn(each.shape, generator=draw))
    return made.to(dtype)


@dataclass(frozen=True)
class Built:
    module: nn.Module
    optimizer: ClippedAdamW
    step: CompiledStep


def build(
    strategy: Strategy,
    name: str,
    *,
    accumulation: int = 1,
    replicas: int = 1,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    rows: Sequence[int] = ROWS,
) -> Built:
    """Inputs are x [rows, 3] and a scale; the loss is scale x mean square, the mean square is what is shown."""
    own = module(dtype).to(device)

    def loss(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        found = own(x).float().square().mean()
        return found * scale, found

    optimizer = ClippedAdamW(list(own.named_parameters()), betas=_BETAS, weight_decay=_DECAY, clip=_CLIP)
    definition = StepDefinition(own, loss, optimizer, prepare=lambda x, scale: Prepared((x * 2, scale)))
    examples = tuple(
        (torch.ones((count, 3), device=device, dtype=dtype), torch.ones((), device=device)) for count in rows
    )
    return Built(own, optimizer, compiled_step(StepPlan(definition, examples, accumulation, replicas, name), strategy))


def data(step: int, replica: int, micro: int, *, rows: Sequence[int] = ROWS) -> Tensor:
    """Other numbers each time, and buckets in turn."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * replica + micro)
    return torch.randn((rows[(step + micro) % len(rows)], 3), generator=draw)


def rate(step: int) -> float:
    return 0.01 * (step + 1)


def scale(step: int) -> float:
    return 1.0 / (step + 1)


def train_plainly(steps: int, *, accumulation: int, replicas: int, first: int = 0) -> list[nn.Module]:
    """Replicas from `first` on, after `steps` steps in plain eager torch: they share the sum of the gradients."""
    modules = [module() for _ in range(replicas)]
    optimizers = [torch.optim.AdamW(each.parameters(), betas=_BETAS, weight_decay=_DECAY) for each in modules]
    for step in range(steps):
        for replica, each in enumerate(modules, first):
            each.zero_grad(set_to_none=False)
            for micro in range(accumulation):
                (each(data(step, replica, micro) * 2).square().mean() * scale(step)).backward()
            for parameter in each.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for together in zip(*(each.parameters() for each in modules), strict=True):
            total = sum(each.grad for each in together)
            for each in together:
                each.grad = total.clone()
        for each, optimizer in zip(modules, optimizers, strict=True):
            nn.utils.clip_grad_norm_(each.parameters(), _CLIP)
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.step()
    return modules


def take_step(
    built: Built, step: int, *, accumulation: int, replica: int = 0, exchange: Exchange | None = None
) -> Tensor:
    """One optimiser step on `data`; the gradient norm."""
    device = built.step.rate.device
    built.step.rate.fill_(rate(step))
    for micro in range(accumulation):
        given = data(step, replica, micro).to(device), torch.tensor(scale(step), device=device)
        built.step.accumulate(*given, first=micro == 0, last=micro == accumulation - 1)
    if exchange is not None:
        exchange.gradients(replica, built.step.gradients)
    before = [each.clone() for each in built.step.gradients]
    norm = built.step.update()
    assert all(torch.equal(one, other) for one, other in zip(before, built.step.gradients, strict=True))
    return norm
