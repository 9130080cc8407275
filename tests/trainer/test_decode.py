"""Speculative decoding: the drafter's two paths agree, the text is the target's own, acceptance is counted right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.drafting import batch, drafter, generator, windows
from tests.trainer.pairs import tiny_pair
from trainer.anchors import Anchors, block_token_ids, sample_anchors
from trainer.block_mask import dense_block_mask, dense_block_masks
from trainer.decode import acceptance_by_position, greedy_decode, mean_tau, speculative_decode
from trainer.dflash_model import DFlashDrafter, DrafterCache
from trainer.errors import InputError
from trainer.evaluate import evaluate
from trainer.loss import block_labels, block_loss
from trainer.target import Target

pytestmark = pytest.mark.torch

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [7], [5, 3, 5, 8, 9, 7, 9, 3]]


@pytest.mark.parametrize("window", windows(6))
def test_drafting_with_a_cache_equals_the_training_forward(window):
    data = batch(21, rows=1, length=14, anchors=1, window=window)
    model, size = drafter(6, config=data.config), 4
    positions = [0, 3, 4, 9, 13]
    anchors = Anchors(torch.tensor([positions]), torch.ones((1, 5), dtype=torch.bool))
    ids = block_token_ids(data.input_ids, anchors, size, 39)
    masks = dense_block_masks(data.config, anchors, torch.tensor([14]), 14)
    with torch.no_grad():
        trained = model(data.embedding[ids], data.target_hidden, anchors.positions, *masks)
        cache, done = DrafterCache(), 0
        for slot, start in enumerate(positions):
            block = data.embedding[ids[:, slot * size : (slot + 1) * size]]
            hidden = model.draft(block, data.target_hidden[:, done:start], start, cache)
            wanted = trained.unflatten(1, (-1, size - 1))[:, slot]
            torch.testing.assert_close(
                hidden[:, 1:] @ data.embedding.T, wanted @ data.embedding.T, rtol=1e-10, atol=1e-10, msg=str(start)
            )
            assert cache.length == start
            done = start
        with pytest.raises(ValueError, match="end at 13"):
            model.draft(block, data.target_hidden[:, :0], 14, cache)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True),
    st.integers(2, 5),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_logits_of_training_and_decoding_agree_for_any_cycles(seed, starts, block_size, slides):
    """Anchors as decoding meets them: any growth between cycles, blocks over the end."""
    window = windows(block_size + slides[0])[slides[1]]
    data = batch(seed, rows=1, length=13, block_size=block_size, window=window)
    model, positions = drafter(seed, config=data.config), sorted(starts)
    anchors = Anchors(torch.tensor([positions]), torch.ones((1, len(positions)), dtype=torch.bool))
    blocks = data.embedding[block_token_ids(data.input_ids, anchors, block_size, 39)]
    masks = dense_block_masks(data.config, anchors, torch.tensor([13]), 13)
    with torch.no_grad():
        trained = model(blocks, data.target_hidden, anchors.positions, *masks).view(len(positions), block_size - 1, -1)
        cache, done = DrafterCache(), 0
        for slot, start in enumerate(positions):
            block = blocks.view(1, len(positions), block_size, -1)[:, slot]
            new = data.target_hidden[:, done:start]
            hidden = model.draft(block, new, start, cache)
            torch.testing.assert_close(
                hidden[0, 1:] @ data.embedding.T, trained[slot] @ data.embedding.T, rtol=1e-9, atol=1e-9
            )
            # only the context enters the cache, never the block
            assert cache.length == start
            done = start


def ids(prompt):
    return torch.tensor([prompt])


def test_greedy_text_is_generates():
    target, _ = tiny_pair()
    for prompt in PROMPTS:
        wanted = target.model.generate(ids(prompt), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
        assert greedy_decode(target, ids(prompt), 12, frozenset()) == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("block_size", [2, 3, 5])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_random_drafter_changes_no_token(prompt, block_size):
    target, random = tiny_pair()
    result = speculative_decode(target, random, ids(prompt), max_new=17, eos_ids=(), block_size=block_size)
    assert result.tokens == greedy_decode(target, ids(prompt), 17, ())
    assert all(0 <= a < block_size for a in result.accepted)
    assert all(len(p) == block_size - 1 for p in result.proposals)
    assert 1 <= result.tau <= block_size


class Oracle(DFlashDrafter):
    """Knows the target's text but for chosen positions: the drafter's ways in and out, with a known answer."""

    def know(self, target: Target, prompt: list[int], text: list[int], wrong: set[int]) -> Oracle:
        self.target, self.offset, self.text, self.wrong = target, len(prompt), text, wrong
        self.given = []
        return self

    def draft(self, block_embeddings, new_target_hidden, start, cache):
        self.given.append(new_target_hidden)
        # the real path runs as well, so that its bookkeeping (start, cache) is checked
        super().draft(block_embeddings, new_target_hidden, start, cache)
        hidden = torch.zeros_like(block_embeddings)
        head = self.target.head_weight
        for k in range(1, block_embeddings.shape[1]):
            place = start - self.offset + k
            token = self.text[place] if place < len(self.text) else 0
            wanted = (token + 1) % head.shape[0] if place in self.wrong else token
            # the state whose most likely word is the wanted one
            hidden[0, k] = torch.linalg.lstsq(head, torch.eye(head.shape[0])[wanted][:, None]).solution[:, 0]
        return hidden


def oracle(prompt, wrong, *, eos_ids=frozenset(), block_size=5, known=40):
    target, random = tiny_pair(block_size=block_size, eos_ids=eos_ids)
    text = greedy_decode(target, ids(prompt), known, ())
    knowing = Oracle(random.config, generator=generator(0)).know(target, prompt, text, wrong)
    return target, knowing, text


def test_accepted_tokens_and_tau_are_counted_with_the_bonus():
    prompt = PROMPTS[0]
    target, knowing, text = oracle(prompt, wrong={2, 3, 10})
    result = speculative_decode(target, knowing, ids(prompt), max_new=21, eos_ids=())
    assert result.tokens == text[:21]
    # token 0 comes from the prompt's pass; then 1 right, 2 wrong (and replaced); 3 wrong at once; 4-7 right; 8 is
    # the bonus; 9 right, 10 wrong; 11-14, bonus 15; 16-19, bonus 20
    assert result.accepted == [1, 0, 4, 1, 4, 4]
    assert result.tau == pytest.approx((2 + 1 + 5 + 2 + 5 + 5) / 6)
    assert mean_tau(result.cycles) == result.tau
    assert acceptance_by_position(result.cycles, 5) == (5 / 6, 3 / 6, 3 / 6, 3 / 6)


def test_the_drafter_is_given_the_targets_states_of_the_committed_text_only():
    """Wrong states would cost acceptance and nothing else: the text would still be the target's."""
    prompt = PROMPTS[0]
    target, knowing, text = oracle(prompt, wrong={2, 3, 10})
    speculative_decode(target, knowing, ids(prompt), max_new=21, eos_ids=())
    given = torch.cat(knowing.given, dim=1)
    assert given.shape[1] == len(prompt) + 15  # up to the last cycle's anchor, token 15
    wanted, _ = target.forward_with_features(ids([*prompt, *text]), target.new_cache())
    torch.testing.assert_close(given, wanted[:, : given.shape[1]], rtol=1e-4, atol=1e-4)


def test_an_end_of_text_cuts_the_text_and_the_count():
    prompt = PROMPTS[1]
    _, _, text = oracle(prompt, set())
    # a token that first occurs in the middle of the second block
    place = next(i for i in range(7, 10) if text[i] not in text[:i])
    eos = frozenset({text[place]})
    target, knowing, _ = oracle(prompt, set(), eos_ids=eos)
    result = speculative_decode(target, knowing, ids(prompt), max_new=40, eos_ids=eos)
    assert result.tokens == text[: place + 1] == greedy_decode(target, ids(prompt), 40, eos)
    assert result.accepted == [4, place - 5]
    first = frozenset({text[0]})
    only = speculative_decode(target, knowing, ids(prompt), max_new=40, eos_ids=first)
    assert (only.tokens, only.cycles) == (text[:1], [])
    with pytest.raises(ValueError, match="no cycle"):
        _ = only.tau


def test_a_drafter_that_was_trained_is_accepted():
    """Training and decoding mean the same positions: what training learned by heart, decoding accepts."""
    target, pupil = tiny_pair(block_size=4, seed=1)
    prompt, new = [2, 7, 1], 20
    text = [*prompt, *greedy_decode(target, ids(prompt), new, ())]
    row, lengths = ids(text), torch.tensor([len(text)])
    loss_mask = (torch.arange(len(text)) >= len(prompt))[None]
    features, _ = target.forward_with_features(row, target.new_cache())
    anchors = sample_anchors(loss_mask, lengths, new, generator(0))
    blocks = target.embed(block_token_ids(row, anchors, 4, 59))
    labels, weights = block_labels(row, loss_mask, lengths, anchors, 4, 2.0)
    mask = dense_block_mask(anchors, lengths, len(text), 4)
    before = evaluate(target, pupil, [prompt], new)
    optimizer = torch.optim.Adam(pupil.parameters(), lr=3e-3)
    for _ in range(80):
        loss = block_loss(pupil(blocks, features, anchors.positions, mask), target.head_weight, labels, weights)
        optimizer.zero_grad()
        (loss.loss_sum / loss.weight_sum).backward()
        optimizer.step()
    after = evaluate(target, pupil, [prompt], new)
    assert before.tau < 2
    # 20 tokens, one from the prompt: 5 cycles of 4 when all is accepted
    assert after.tau > 3.5
    assert after.first_slot_acceptance == after.accepted_by_position[0] > 0.9
    assert after.tokens == new
    assert after.lossless
    assert after.mismatches == []


class Forgetful(Target):
    """Does not take rejected tokens out of its cache: what speculative decoding must never do."""

    def crop(self, cache, length):
        super().crop(cache, length + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_that_is_not_the_targets_is_reported_and_not_tolerated(dtype):
    target, random = tiny_pair(dtype=dtype)
    wrong, _ = tiny_pair(dtype=dtype, kind=Forgetful)
    found = evaluate(wrong, random, PROMPTS, 12)
    assert not found.lossless
    worst = [m for m in found.mismatches if not m.tolerated]
    assert worst
    for mismatch in worst:
        assert mismatch.margin > mismatch.tolerance
        own = greedy_decode(target, ids(PROMPTS[mismatch.prompt]), 12, ())
        spec = speculative_decode(wrong, random, ids(PROMPTS[mismatch.prompt]), max_new=12, eos_ids=()).tokens
        assert own[: mismatch.position] == spec[: mismatch.position]
        assert own[mismatch.position] != spec[mismatch.position]


def test_rounding_in_bfloat16_is_told_from_errors():
    target, random = tiny_pair(dtype=torch.bfloat16)
    prompts = [torch.randint(0, 59, (6,), generator=generator(seed)).tolist() for seed in range(2)]
    found = evaluate(target, random, prompts, 16)
    assert found.lossless
    for mismatch in found.mismatches:
        assert 0 <= mismatch.margin <= mismatch.tolerance < 1


def test_evaluation_sums_over_prompts():
    target, random = tiny_pair()
    found = evaluate(target, random, PROMPTS, 9)
    each = [speculative_decode(target, random, ids(p), max_new=9, eos_ids=()) for p in PROMPTS]
    cycles = [cycle for result in each for cycle in result.cycles]
    assert found.cycles == len(cycles)
    assert found.tokens == 9 * len(PROMPTS)
    assert found.tau == pytest.approx(sum(c.accepted + 1 for c in cycles) / len(cycles))
    assert len(found.accepted_by_position) == 4
    assert found.lossless


@pytest.mark.parametrize("prompts", [[], [[1, 2], []]])
def test_nothing_to_decode_is_refused(prompts):
    target, random = tiny_pair()
    with pytest.raises(InputError, match="prompts"):
        evaluate(target, random, prompts, 5)


def test_answers_without_a_cycle_are_refused():
    target, random = tiny_pair()
    with pytest.raises(InputError, match="first token"):
        evaluate(target, random, PROMPTS, 1)
