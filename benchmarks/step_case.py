"""One case of `gpu_steps.py`, in a process of its own: replicas of a launch-bound model, a thread each, on one device.

The model is that of the first measurements: 5 pre-norm transformer layers, 2 x 256 tokens, forward, backward and AdamW
(clipped; under bfloat16 with float32 masters) by `trainer.compile`. Prints one JSON object last. Several cases may
run at once: they build side by side, and each has the machine for itself while it is timed (a lock on `LOCK`).
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.abort import Abort
from trainer.canary.measure import relative, tolerance
from trainer.compile import STRATEGIES, CompiledStep, Gate, Prepared, StepDefinition, compiled_step, steady_phase
from trainer.exchange import ThreadExchange
from trainer.optimizer import MasterAdamW
from trainer.workers import on_device

ROWS, TOKENS, HEADS = 2, 256, 8


@dataclass(frozen=True)
class Case:
    """`exchange`: the replicas sum their gradients each step; without it they are independent."""

    strategy: str
    width: int = 512
    layers: int = 5
    replicas: int = 1
    exchange: bool = False
    steps: int = 200
    profile: bool = False


class Block(nn.Module):
    """Attention and a gated feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 8 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, S, D] to the same."""
        rows, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, width))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * value)


class Replica:
    """A model with data of its own; every replica has other weights, unless they are exchanged."""

    def __init__(self, case: Case, index: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch_state = torch.get_rng_state()
        torch.manual_seed(0 if case.exchange else index)
        self.module = nn.Sequential(*[Block(case.width) for _ in range(case.layers)]).to(device, dtype)
        torch.set_rng_state(torch_state)
        generator = torch.Generator(device).manual_seed(1000 + index)
        shape = (ROWS, TOKENS, case.width)
        self.batches = [
            [torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(2)] for _ in range(4)
        ]
        self.normaliser = torch.full((), 1.0 / (ROWS * TOKENS * case.width), device=device)
        self.optimizer = MasterAdamW(
            list(self.module.named_parameters()), betas=(0.9, 0.95), weight_decay=0.01, clip=1.0
        )
        self.optimizer.rate.fill_(1e-4)

    def definition(self) -> StepDefinition:
        """The step of this replica."""
        return StepDefinition(
            module=self.module,
            loss=_loss(self.module),
            optimizer=self.optimizer,
            prepare=lambda *inputs: Prepared(inputs),
        )


def _loss(module: nn.Module) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    def loss(inputs: Tensor, wanted: Tensor, normaliser: Tensor, /) -> tuple[Tensor, Tensor]:
        total = (module(inputs) - wanted).float().square().sum() * normaliser
        return total, total.detach()

    return loss


class Seed:
    """A `CompiledStep` as the first team wrote it: reduce-overhead with trees off, `.grad`, torch's fused AdamW."""

    def __init__(self, replica: Replica) -> None:
        self._module = replica.module
        options = {**torch._inductor.list_mode_options("reduce-overhead"), "triton.cudagraph_trees": False}
        self._loss = torch.compile(_loss(replica.module), options=options)
        self._adamw = torch.optim.AdamW(replica.module.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.rate = torch.zeros(())
        for each in self._module.parameters():
            each.grad = torch.zeros_like(each)
        # its backward reads the inputs where they lay at the capture
        self._held = [*(each.clone() for each in replica.batches[0]), replica.normaliser]
        for _ in range(3):
            self.accumulate(*replica.batches[0], replica.normaliser, first=True, last=True)

    @property
    def gradients(self) -> list[Tensor]:
        """See `CompiledStep`."""
        return [each.grad for each in self._module.parameters() if each.grad is not None]

    def accumulate(self, *inputs: Tensor, first: bool, last: bool) -> Tensor:
        """See `CompiledStep`; every step has one micro-batch here."""
        for held, value in zip(self._held, inputs, strict=True):
            held.copy_(value)
        self._adamw.zero_grad(set_to_none=False)
        loss, seen = self._loss(*self._held)
        loss.backward()
        return seen.clone()

    def update(self) -> Tensor:
        """See `CompiledStep`."""
        norm = nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        self._adamw.step()
        return norm


class Run:
    """All threads of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self.abort = Abort()
        self.exchange = ThreadExchange(case.replicas, self.abort)
        self.together = threading.Barrier(case.replicas)
        self.abort.subscribe(self.together.abort)
        self.found: list[dict[str, Any]] = [{} for _ in range(case.replicas)]

    def run(self) -> dict[str, Any]:
        """The case's figures."""
        with open(os.environ["LOCK"], "w") as lock, steady_phase() as forbid:
            fcntl.flock(lock, fcntl.LOCK_SH)

            def opened() -> None:
                forbid()
                fcntl.flock(lock, fcntl.LOCK_EX)

            gate = Gate(self.case.replicas, self.abort, on_open=opened)
            threads = [
                threading.Thread(target=self._guarded, args=(index, gate), name=f"replica-{index}", daemon=True)
                for index in range(self.case.replicas)
            ]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        if self.abort.failure is not None:
            raise self.abort.failure
        slowest = max(each["seconds"] for each in self.found)
        return {
            "ms_a_step": 1e3 * slowest / self.case.steps,
            "steps_a_second_all": self.case.replicas * self.case.steps / slowest,
            "warm_up_s": [round(each["warm_up_s"], 2) for each in self.found],
            "worst_share_of_tolerance": max(each["share"] for each in self.found),
            "right": all(each["share"] <= 1 for each in self.found),
            **({"kernels_ms_a_step": self.found[0]["kernels_ms"]} if self.case.profile else {}),
            **self._memory(),
        }

    def _memory(self) -> dict[str, float]:
        if self.device.type != "cuda":
            return {}
        return {
            "peak_allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
            "peak_reserved_mib": torch.cuda.max_memory_reserved() / 2**20,
        }

    def _guarded(self, index: int, gate: Gate) -> None:
        try:
            torch.set_num_threads(1)
            with on_device(self.device):
                self._work(index, gate)
        except BaseException as error:
            self.abort.fail(threading.current_thread().name, error)

    def _work(self, index: int, gate: Gate) -> None:
        case, found = self.case, self.found[index]
        started = time.monotonic()
        with gate.exclusive(f"replica-{index}"):
            replica = Replica(case, index, self.device)
            step = Seed(replica) if case.strategy == "seed" else self._compiled(index, replica)
            found["warm_up_s"] = time.monotonic() - started
        gate.pass_through()
        windows = []
        for window in range(6):
            self.together.wait()
            began = time.perf_counter()
            for number in range(case.steps):
                self._step(index, replica, step, number)
            self._wait()
            if window:  # the first is a warm-up
                windows.append(time.perf_counter() - began)
        found["seconds"] = statistics.median(windows)
        if case.profile:
            found["kernels_ms"] = self._kernels(index, replica, step)
        self._check(index, replica, step)

    def _compiled(self, index: int, replica: Replica) -> CompiledStep:
        examples = [(*replica.batches[0], replica.normaliser)]
        return compiled_step(replica.definition(), STRATEGIES[self.case.strategy], examples, name=f"replica_{index}")

    def _step(self, index: int, replica: Replica, step: CompiledStep, number: int) -> None:
        step.accumulate(*replica.batches[number % 4], replica.normaliser, first=True, last=True)
        if self.case.exchange:
            self.exchange.gradients(index, step.gradients)
        step.update()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _kernels(self, index: int, replica: Replica, step: CompiledStep, steps: int = 20) -> float:
        """Sum of the kernels' own times, ms a step; of one replica alone."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for number in range(steps):
                self._step(index, replica, step, number)
            self._wait()
        return sum(each.self_device_time_total for each in profile.key_averages()) / 1e3 / steps

    def _check(self, index: int, replica: Replica, step: CompiledStep) -> None:
        """One more step, of all at once: the gradient against eager code and float64, from the same weights."""
        self.together.wait()
        batch = replica.batches[0]
        weights = [each.detach().clone() for each in replica.module.parameters()]
        step.accumulate(*batch, replica.normaliser, first=True, last=True)
        mine = [each.detach().clone() for each in step.gradients]
        self._wait()
        self.together.wait()
        with torch.no_grad():
            for each, before in zip(replica.module.parameters(), weights, strict=True):
                each.copy_(before)
        plain = _gradients(replica, batch, replica.module)
        truth = _gradients(replica, batch, replica.module.double())
        dtype = weights[0].dtype
        shares = [
            relative(found, true) / tolerance(relative(eager, true), dtype)
            for found, eager, true in zip(mine, plain, truth, strict=True)
        ]
        self.found[index]["share"] = max(shares)


def _gradients(replica: Replica, batch: list[Tensor], module: nn.Module) -> list[Tensor]:
    dtype = next(module.parameters()).dtype
    loss, _ = _loss(module)(*(each.to(dtype) for each in batch), replica.normaliser)
    return list(torch.autograd.grad(loss, list(module.parameters())))


def main() -> None:
    """Reads the case from the only argument."""
    case = Case(**json.loads(sys.argv[1]))
    print(json.dumps({"case": dataclasses.asdict(case), **Run(case).run()}), flush=True)


if __name__ == "__main__":
    main()
