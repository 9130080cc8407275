"""Anchors, inputs, labels, weights and mask of a small batch, against their definitions written out in plain Python.

The reference of the gate takes them from the trainer's own functions, and would be wrong together with the workers.
The definitions: `anchors`, `loss.block_labels` and the four rules of `block_mask`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.anchors import Anchors, anchor_rule, block_token_ids, eligible_anchors, sample_anchors
from trainer.block_mask import dense_block_mask
from trainer.canary.evidence import Check, Evidence, Outcome
from trainer.drafter_config import FROM_ANCHOR, SlidingWindow
from trainer.loss import block_labels
from trainer.sampler import derive_seed

_ROWS, _TOKENS, _ANCHORS = 3, 24, 5
_GAMMA = 3.0
_CLOSE = 1e-6


def judge_definition(block_size: int, evidence: Evidence) -> None:
    """Add the check; on the CPU, in milliseconds."""
    problem = next(_problems(block_size), None)
    outcome = Outcome.FAIL if problem else Outcome.PASS
    summary = problem or f"{_ROWS * _ANCHORS} blocks of {block_size}: anchors, inputs, labels, weights, mask"
    evidence.add(Check("definition", None, outcome, summary))


def _problems(size: int) -> Iterator[str]:
    generator = torch.Generator().manual_seed(derive_seed("definition"))
    ids = torch.randperm(_ROWS * _TOKENS, generator=generator).view(_ROWS, _TOKENS)
    mask_token = _ROWS * _TOKENS
    # the middle row is short, the last one has fewer eligible positions than slots
    lengths = torch.tensor([_TOKENS, _TOKENS - 7, _TOKENS])
    supervised = torch.rand((_ROWS, _TOKENS), generator=generator) < 0.8
    supervised[2, 6:] = False
    yield from _wrong_rules(supervised, lengths, size)
    anchors = sample_anchors(supervised, lengths, _ANCHORS, generator)
    inputs = block_token_ids(ids, anchors, size, mask_token).view(_ROWS, _ANCHORS, size)
    labels, weights = block_labels(ids, supervised, lengths, anchors, size, _GAMMA)
    windows = (None, SlidingWindow(size + 2), SlidingWindow(size + 2, FROM_ANCHOR, causal=False))
    seen = {
        window: dense_block_mask(anchors, lengths, _TOKENS, size, window)[:, 0].view(_ROWS, _ANCHORS, size, -1)
        for window in windows
    }
    for row in range(_ROWS):
        length, counts = int(lengths[row]), supervised[row].tolist()
        yield from _wrong_anchors(row, anchors, [a for a in range(length - 1) if counts[a] and counts[a + 1]])
        for block in range(_ANCHORS):
            anchor, real = int(anchors.positions[row, block]), bool(anchors.keep[row, block])
            where = f"row {row}, anchor {anchor}"
            token = int(ids[row, anchor])
            if inputs[row, block].tolist() != [token] + [mask_token] * (size - 1):
                yield f"{where}: the block's input is {inputs[row, block].tolist()}, {token} and masks needed"
            context = min(anchor, length) if real else 0
            for slot in range(size):
                for window, mask in seen.items():
                    found = mask[row, block, slot].nonzero()[:, 0].tolist()
                    keys = [*_context(context, slot, window), *_own(block, slot, size, window)]
                    if found != keys:
                        wrong = sorted(set(found) ^ set(keys))[0]
                        yield f"{where}, slot {slot}: {'sees' if wrong in found else 'does not see'} key {wrong}"
                at = anchor + slot
                used = real and slot > 0 and at < length and counts[at]
                weight = math.exp(-(slot - 1) / _GAMMA) if used else 0.0
                if not math.isclose(float(weights[row, block, slot]), weight, rel_tol=_CLOSE):
                    yield f"{where}, slot {slot}: weight {float(weights[row, block, slot]):.4f}, {weight:.4f} needed"
                if used and int(labels[row, block, slot]) != int(ids[row, at]):
                    yield f"{where}, slot {slot}: the label is not the token at {at}"


def _wrong_rules(supervised: Tensor, lengths: Tensor, size: int) -> Iterator[str]:
    """Eligible positions by each public trainer's rule, token by token."""
    for name, room in (("specforge", 1), ("torchspec", size - 1), ("speculators", size)):
        found = eligible_anchors(supervised, lengths, anchor_rule(name, size)).tolist()
        for row in range(_ROWS):
            length, counts = int(lengths[row]), supervised[row].tolist()
            for at in range(_TOKENS):
                behind = counts[at + 1 : min(length, at + 2 if name == "specforge" else at + size)]
                if found[row][at] != (counts[at] and at + room < length and any(behind)):
                    yield f"row {row}: {at} is {'' if found[row][at] else 'not '}eligible by {name}'s rule"


def _context(limit: int, slot: int, window: SlidingWindow | None) -> range:
    """Context positions that a slot sees of `limit`."""
    if window is None:
        return range(limit)
    # a window from the query holds the query itself
    before = window.size if window.origin == FROM_ANCHOR else window.size - 1 - slot
    return range(max(0, limit - before), limit)


def _own(block: int, slot: int, size: int, window: SlidingWindow | None) -> range:
    """Keys of its own block that a slot sees."""
    first = _TOKENS + block * size
    return range(first, first + (slot + 1 if window is not None and window.causal else size))


def _wrong_anchors(row: int, anchors: Anchors, eligible: list[int]) -> Iterator[str]:
    kept = anchors.positions[row][anchors.keep[row]].tolist()
    if kept != sorted(set(kept) & set(eligible)) or len(kept) != min(_ANCHORS, len(eligible)):
        yield f"row {row}: anchors {kept}, {min(_ANCHORS, len(eligible))} of {eligible} needed"
