"""What `step_case.py` trains: a launch-bound transformer, and the drafter at real shapes. Random data throughout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.anchors import Anchors, sample_anchors
from trainer.canary.evidence import Outcome
from trainer.canary.measure import Distance, compare, relative, tolerance, worst
from trainer.canary.noise import Noise
from trainer.canary.perturbation import perturbed_gradient
from trainer.canary.reference import GROUP, Eager, Order, StepReference
from trainer.compile import STRATEGIES, CompiledStep, Prepared, StepDefinition, StepPlan, compiled_step
from trainer.dflash_model import DFlashDrafter
from trainer.drafter_config import DrafterConfig
from trainer.fp8 import NarrowHead
from trainer.loss import DFLASH, block_labels, decay_gamma
from trainer.optimizer import ClippedAdamW
from trainer.step import Batch, DrafterStep, FrozenHead

ROWS, TOKENS, HEADS = 2, 256, 8
BATCHES = 4


@dataclass(frozen=True)
class Judged:
    """The worst share of the tolerance, infinite where nothing was proved, and what it is of."""

    share: float
    what: str


class Trained(Protocol):
    """One replica, in its thread."""

    @property
    def gradients(self) -> list[Tensor]:
        """What an exchange sums."""
        ...

    @property
    def flops(self) -> float | None:
        """Of a step, as the reference counts them; None where nobody counted."""
        ...

    def accumulate(self, number: int) -> None:
        """Forward and backward of the step's only micro-batch."""
        ...

    def update(self) -> None:
        """Clip and optimiser."""
        ...

    def judged(self) -> Judged:
        """Takes a last step, and compares its gradient."""
        ...


class Block(nn.Module):
    """Attention and a gated feed-forward, pre-norm."""

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


class LaunchBound:
    """5 layers (by default), 2 x 256 tokens: kernels so short that launching them is what takes the time.

    `replicas` exchange their gradients and begin with the same weights.
    """

    def __init__(
        self,
        strategy: str,
        width: int,
        layers: int,
        index: int,
        *,
        replicas: int,
        masters: bool,
        device: torch.device,
    ):
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(1000 + index)
        with torch.random.fork_rng():
            torch.manual_seed(0 if replicas > 1 else index)
            self._module = nn.Sequential(*[Block(width) for _ in range(layers)]).to(device, self._dtype)
        shape = (ROWS, TOKENS, width)
        self._batches = [
            [torch.randn(shape, device=device, dtype=self._dtype, generator=generator) for _ in range(2)]
            for _ in range(BATCHES)
        ]
        self._normaliser = torch.full((), 1.0 / (ROWS * TOKENS * width), device=device)
        self._step = self._built(strategy, f"replica_{index}", replicas, masters)
        self._step.rate.fill_(1e-4)

    def _built(self, strategy: str, name: str, replicas: int, masters: bool) -> CompiledStep:
        example = [*self._batches[0], self._normaliser]
        if strategy == "seed":
            return Seed(self._module, example)
        parameters = list(self._module.named_parameters())
        definition = StepDefinition(
            module=self._module,
            loss=_squares(self._module),
            optimizer=ClippedAdamW(parameters, betas=(0.9, 0.95), weight_decay=0.01, clip=1.0, masters=masters),
            prepare=lambda *inputs: Prepared(inputs),
        )
        plan = StepPlan(definition, (tuple(example),), accumulation=1, replicas=replicas, name=name)
        return compiled_step(plan, STRATEGIES[strategy])

    @property
    def gradients(self) -> list[Tensor]:
        """See `Trained`."""
        return self._step.gradients

    @property
    def flops(self) -> float | None:
        """See `Trained`."""
        return None

    def accumulate(self, number: int) -> None:
        """See `Trained`."""
        self._step.accumulate(*self._batches[number % BATCHES], self._normaliser, first=True, last=True)

    def update(self) -> None:
        """See `Trained`."""
        self._step.update()

    def judged(self) -> Judged:
        """See `Trained`: against eager code and float64, from the same weights."""
        parameters = list(self._module.parameters())
        before = [each.detach().clone() for each in parameters]
        self.accumulate(0)
        mine = [each.detach().clone() for each in self._step.gradients]
        with torch.no_grad():
            for each, kept in zip(parameters, before, strict=True):
                each.copy_(kept)
        plain = self._eager(self._module)
        truth = self._eager(self._module.double())
        distances = [
            Distance("", relative(found, true), tolerance(relative(eager, true), self._dtype))
            for found, eager, true in zip(mine, plain, truth, strict=True)
        ]
        return Judged(worst(distances).share, "gradient")

    def _eager(self, module: nn.Module) -> list[Tensor]:
        dtype = next(module.parameters()).dtype
        loss, _ = _squares(module)(*(each.to(dtype) for each in self._batches[0]), self._normaliser)
        return list(torch.autograd.grad(loss, list(module.parameters())))


def _squares(module: nn.Module) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    def loss(inputs: Tensor, wanted: Tensor, normaliser: Tensor, /) -> tuple[Tensor, Tensor]:
        total = (module(inputs) - wanted).float().square().sum() * normaliser
        return total, total.detach()

    return loss


class Seed:
    """A `CompiledStep` as the first team wrote it: reduce-overhead with trees off, `.grad`, torch's fused AdamW."""

    def __init__(self, module: nn.Module, example: list[Tensor]) -> None:
        self._module = module
        options = {**torch._inductor.list_mode_options("reduce-overhead"), "triton.cudagraph_trees": False}
        self._loss = torch.compile(_squares(module), options=options)
        self._adamw = torch.optim.AdamW(module.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.rate = torch.zeros(())
        for each in module.parameters():
            each.grad = torch.zeros_like(each)
        # its backward reads the inputs where they lay at the capture
        self._held = [each.clone() for each in example]
        for _ in range(3):
            self.accumulate(*example, first=True, last=True)

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


# (hidden, FFN, drafter layers, heads, key heads, head size, vocabulary), then (tokens, anchors, block size)
DRAFTERS = {
    "drafter-tiny": ((32, 48, 1, 2, 1, 16, 64), (64, 4, 4)),
    "drafter-135m": ((576, 1536, 2, 9, 3, 64, 49152), (256, 64, 8)),
    "drafter-8b": ((4096, 12288, 5, 32, 8, 128, 151936), (3072, 512, 16)),
}


class Drafter:
    """The real drafter over a random frozen head: SmolLM2-135M's shape, or Qwen3-8B's."""

    def __init__(
        self,
        model: str,
        strategy: str,
        index: int,
        *,
        rows: int,
        replicas: int,
        masters: bool,
        narrow: bool,
        device: torch.device,
    ) -> None:
        """`narrow`: the blocks' linear layers and the head multiply 8-bit floats."""
        (hidden, ffn, layers, heads, key_heads, head, vocabulary), (tokens, anchors, block) = DRAFTERS[model]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        config = DrafterConfig(
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=head,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            vocab_size=vocabulary,
            block_size=block,
            num_target_layers=36,
            target_layer_ids=(1, 9, 17, 25, 33),
            mask_token_id=vocabulary - 1,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            initializer_range=0.02,
        )
        generator = torch.Generator().manual_seed(index)
        numbers = torch.Generator().manual_seed(0)
        drafter = DFlashDrafter(config, device="cpu", dtype=dtype, generator=numbers, narrow=narrow)
        self._first = {name: each.detach().clone() for name, each in drafter.named_parameters()}
        self._drafter = drafter = drafter.to(device).requires_grad_(True)
        on_device = torch.Generator(device).manual_seed(7)
        embed = torch.randn((vocabulary, hidden), device=device, generator=on_device).mul_(0.02).to(dtype)
        self._frozen = FrozenHead(embed, embed, NarrowHead.of(embed) if narrow else None)
        self._batches = [_batch(config, rows, tokens, anchors, generator, embed) for _ in range(2)]
        self._normaliser = torch.full((), 1.0 / self._batches[0].weight_sum, device=device)
        self._flops = _drafter_flops(config, self._batches[0])
        self._step = DrafterStep(
            drafter,
            self._frozen,
            ClippedAdamW(
                list(drafter.named_parameters()), betas=(0.9, 0.95), weight_decay=0.0, clip=1.0, masters=masters
            ),
            STRATEGIES[strategy],
            buckets=[tokens],
            rows=rows,
            slots=anchors,
            accumulation=1,
            replicas=replicas,
            name=f"replica_{index}",
        )
        self._step.rate.fill_(1e-5)

    @property
    def gradients(self) -> list[Tensor]:
        """See `Trained`."""
        return self._step.gradients

    @property
    def flops(self) -> float | None:
        """See `Trained`."""
        return self._flops

    def accumulate(self, number: int) -> None:
        """See `Trained`."""
        self._step.accumulate(self._batches[number % 2], self._normaliser, first=True, last=True)

    def update(self) -> None:
        """See `Trained`."""
        self._step.update()

    def judged(self) -> Judged:
        """See `Trained`: from the first weights, as the canary's gate judges a worker, by its reference.

        (After a few dozen steps on two batches their gradient is little more than rounding.)
        """
        named = dict(self._drafter.named_parameters())
        with torch.no_grad():
            for name, each in named.items():
                each.copy_(self._first[name])
        self.accumulate(0)
        mine = {name: each.detach().clone() for name, each in zip(named, self.gradients, strict=True)}
        dtype = self._frozen.embed_weight.dtype
        truth, plain = (self._reference(each) for each in (torch.float64, dtype))
        half = min(GROUP, self._batches[0].anchors.positions.shape[1]) // 2
        other = self._reference(dtype, Order(group=half, backwards=True))
        noise = Noise(dtype, narrow=self._frozen.narrow is not None)
        for found, right in ((plain, truth), (other, truth), (other, plain)):
            noise.see(found, right)
        control = perturbed_gradient(mine, truth.gradient, noise, dtype)
        if control.outcome is not Outcome.PASS:
            return Judged(math.inf, f"the comparison proves nothing: {control.summary}")
        found_worst = worst(compare(mine, truth.gradient, noise.allowed))
        return Judged(found_worst.share, found_worst.name)

    def _reference(self, dtype: torch.dtype, order: Order | None = None) -> StepReference:
        narrow = self._frozen.narrow is not None
        eager = Eager(self._drafter.config, self._frozen, dtype, DFLASH, narrow=narrow)
        return eager.step(self._first, self._batches[:1], float(self._normaliser), order)


def _drafter_flops(config: DrafterConfig, batch: Batch) -> float:
    """Linears three times (forward, and both gradients), attention 3.5 times, the head twice, since it is frozen.

    The head is counted for all slots, though slot 0 is left out.
    """
    rows, tokens = batch.input_ids.shape
    hidden, layers, size = config.hidden_size, config.num_hidden_layers, config.block_size
    queries = batch.anchors.positions.numel() * size
    heads, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    slots = queries * layers * 2 * hidden * (2 * heads + 2 * keys + 3 * config.intermediate_size)
    context = rows * tokens * 2 * hidden * (layers * 2 * keys + len(config.target_layer_ids) * hidden)
    attention = 4 * (float(batch.anchors.positions.sum()) * size + queries * size) * heads * layers
    head = queries * 2 * hidden * config.vocab_size
    return 3 * (slots + context) + 3.5 * attention + 2 * head


def _batch(  # noqa: PLR0917 -- sizes, and where to
    config: DrafterConfig, rows: int, tokens: int, anchors: int, generator: torch.Generator, embed: Tensor
) -> Batch:
    device, dtype = embed.device, embed.dtype
    ids = torch.randint(0, config.vocab_size - 1, (rows, tokens), generator=generator)
    lengths = torch.full((rows,), tokens)
    mask = torch.ones((rows, tokens), dtype=torch.bool)
    found = sample_anchors(mask, lengths, anchors, generator)
    labels, weights = block_labels(ids, mask, lengths, found, config.block_size, decay_gamma(config.block_size))
    features = torch.randn((rows, tokens, len(config.target_layer_ids) * config.hidden_size), generator=generator)
    return Batch(
        row_ids=tuple(range(rows)),
        input_ids=ids.to(device),
        lengths=lengths.to(device),
        features=features.to(device, dtype),
        anchors=Anchors(found.positions.to(device), found.keep.to(device)),
        labels=labels.to(device),
        weights=weights.to(device),
        weight_sum=float(weights.double().sum()),
    )
