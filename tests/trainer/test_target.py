"""The target against transformers itself: hidden states, decoding, refusals, and the GGUF conversion."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from trainer import mask_token as mask_token_module
from trainer.compile import CaptureError
from trainer.compile.recorded import RecordedPiece
from trainer.errors import InputError
from trainer.mask_token import resolve_mask_token
from trainer.recorded_target import RecordedTarget
from trainer.target import Target
from trainer.target_files import target_folder, target_identity

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def load(path: Path, layers: tuple[int, ...], cache: Path) -> Target:
    return Target.load(path, [CPU], torch.float32, layers, cache)


@pytest.fixture
def rows() -> tuple[Any, Any]:
    ids = torch.tensor([[2, 9, 10, 11, 12, 13], [2, 20, 21, 1, 1, 1]])
    return ids, torch.tensor([6, 3])


@pytest.mark.parametrize("layers", [(1, 2), (0,), (3, 4), (4,)])
def test_features_are_transformers_hidden_states(
    tiny_target: Path, tmp_path: Path, rows: tuple[Any, Any], layers: tuple[int, ...]
) -> None:
    ids, lengths = rows
    target = load(tiny_target, layers, tmp_path)
    found = target.features(ids, lengths)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    for row, length in enumerate(lengths.tolist()):
        with torch.no_grad():
            states = reference(ids[row : row + 1, :length], output_hidden_states=True).hidden_states
        wanted = torch.cat([states[index + 1] for index in layers], dim=-1)[0]
        torch.testing.assert_close(found[row, :length], wanted, rtol=1e-5, atol=1e-5)
        assert not found[row, length:].any()


def test_layers_above_the_last_wanted_one_are_not_run(tiny_target: Path, tmp_path: Path, rows: tuple[Any, Any]) -> None:
    target = load(tiny_target, (0, 2), tmp_path)
    ran: list[int] = []
    for index, layer in enumerate(target.model.model.layers):
        layer.register_forward_hook(lambda _m, _i, _o, index=index: ran.append(index))
    target.model.lm_head.register_forward_hook(lambda _m, _i, _o: ran.append(99))
    target.features(*rows)
    assert ran == [0, 1, 2]


def test_decoding_in_pieces_equals_one_pass(tiny_target: Path, tmp_path: Path) -> None:
    target = load(tiny_target, (1, 3), tmp_path)
    ids = torch.tensor([[2, 9, 10, 11, 12, 13, 14]])
    whole, logits = target.forward_with_features(ids, target.new_cache())
    torch.testing.assert_close(whole, target.features(ids, torch.tensor([7])), rtol=1e-5, atol=1e-5)
    cache = target.new_cache()
    target.forward_with_features(ids[:, :4], cache)
    target.forward_with_features(torch.tensor([[30, 31]]), cache)
    target.crop(cache, 4)
    tail, tail_logits = target.forward_with_features(ids[:, 4:], cache)
    torch.testing.assert_close(tail, whole[:, 4:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tail_logits, logits[:, 4:], rtol=1e-4, atol=1e-4)
    assert target.eos_ids == {3}
    assert torch.equal(target.embed(ids), target.embed_weight[ids])


def test_generated_text_is_not_planned_token_by_token(tiny_target: Path, tmp_path: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    load(tiny_target, (1,), tmp_path)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_threads_do_not_mix_their_states(tiny_target: Path, tmp_path: Path) -> None:
    import threading

    target = load(tiny_target, (1, 2), tmp_path)
    inputs = [torch.randint(8, 48, (1, 12), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    length = torch.tensor([12])
    wanted = [target.features(each, length) for each in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if not torch.equal(target.features(inputs[index], length), wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


def test_layer_ids_out_of_range(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give ids from 0 to 4"):
        load(tiny_target, (1, 5), tmp_path)


def test_an_unknown_family_is_named(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=16)
    with pytest.raises(InputError, match="'gpt2'"):
        Target(transformers.GPT2LMHeadModel(config), None, (0,))


def test_paths_that_are_no_target(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"no \*\.safetensors"):
        load(tmp_path, (0,), tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"no magic")
    with pytest.raises(InputError, match="is no target model"):
        load(tmp_path / "x.gguf", (0,), tmp_path)


def test_identity_follows_content(tiny_target: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    assert target_identity(copy) == target_identity(tiny_target)
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert target_identity(copy) != target_identity(tiny_target)


def write_gguf(path: Path) -> Path:
    """A tiny Llama with a byte-pair tokenizer as a GGUF file."""
    import gguf
    import numpy as np

    numbers = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(2)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<s>", "</s>", "<m>", "a", "b", "c", "d", "ab"])
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, numbers.normal(0, 0.2, shape).astype(np.float32))

    add("token_embd.weight", 8, 16)
    add("output.weight", 8, 16)
    writer.add_tensor("output_norm.weight", np.ones(16, np.float32))
    for layer in range(2):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(16, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", 16, 16)
        add(f"blk.{layer}.ffn_gate.weight", 32, 16)
        add(f"blk.{layer}.ffn_up.weight", 32, 16)
        add(f"blk.{layer}.ffn_down.weight", 16, 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_is_converted_once_and_computes_the_same(tmp_path: Path) -> None:
    file, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    target = load(file, (0,), cache)
    folder = target_folder(file, cache)
    assert folder.is_relative_to(cache / "targets")
    weights = next(folder.glob("*.safetensors"))
    made = weights.stat().st_mtime_ns
    again = load(file, (0,), cache)
    assert weights.stat().st_mtime_ns == made
    direct = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    ).eval()
    ids = torch.tensor([[3, 4, 7, 5]])
    with torch.no_grad():
        wanted = direct(ids, output_hidden_states=True)
    found, logits = again.forward_with_features(ids, again.new_cache())
    torch.testing.assert_close(found, wanted.hidden_states[1])
    torch.testing.assert_close(logits, wanted.logits)
    torch.testing.assert_close(target.features(ids, torch.tensor([4])), found)


def family(model_type: str, vocabulary: int) -> Any:
    """What is asked of a target's config."""
    return SimpleNamespace(model_type=model_type, vocab_size=vocabulary)


def test_mask_token_by_name_and_id(tiny_target: Path, tmp_path: Path) -> None:
    tokenizer = load(tiny_target, (0,), tmp_path).tokenizer
    assert resolve_mask_token("<reserved_0>", tokenizer, family("llama", 48)) == 6
    assert resolve_mask_token(7, tokenizer, family("llama", 48)) == 7


def test_mask_token_of_the_family(tiny_target: Path, tmp_path: Path) -> None:
    """The ids are those of released drafters, in vocabularies as large as the families' own."""
    tokenizer = load(tiny_target, (0,), tmp_path).tokenizer
    for name, vocabulary, wanted in (
        ("qwen3", 151936, 151669), ("qwen3_5", 248320, 248070), ("minimax_m2", 200064, 200054),
        ("kimi_k25", 163840, 163838),
    ):  # fmt: skip
        assert resolve_mask_token("auto", tokenizer, family(name, vocabulary)) == wanted


@pytest.mark.parametrize(
    ("reserved", "special", "said"),
    [
        (True, True, None),
        (True, False, "is the ordinary token 'w2000' here"),
        (False, False, "is outside this target's vocabulary of 1000"),
    ],
)
def test_the_familys_mask_token_must_be_free(
    reserved: bool, special: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import AddedToken, Tokenizer, models

    # a family whose id is small enough for a real tokenizer in a test
    monkeypatch.setitem(mask_token_module._FAMILIES, "qwen3", 2000)
    words = {f"w{index}": index for index in range(2003 if reserved else 1000)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    if special:
        raw.add_special_tokens([AddedToken("w2000", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w0")
    config = family("qwen3", 2100 if reserved else 1000)
    if said is None:
        assert resolve_mask_token("auto", tokenizer, config) == 2000
        return
    with pytest.raises(InputError, match=said) as refused:
        resolve_mask_token("auto", tokenizer, config)
    assert "take " in refused.value.fix


def test_a_family_without_a_known_mask_token_gets_candidates(tiny_target: Path, tmp_path: Path) -> None:
    tokenizer = load(tiny_target, (0,), tmp_path).tokenizer
    with pytest.raises(InputError, match=r"no mask token is known for the model family 'llama'.*<reserved_0>"):
        resolve_mask_token("auto", tokenizer, family("llama", 48))
    with pytest.raises(InputError, match=r"an id that is no token of the tokenizer, such as 48 \(up to 63\)"):
        resolve_mask_token("auto", tokenizer, family("llama", 64))


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("<pad>", "is the target's pad token"),
        (3, "is the target's eos token"),
        ("<s>", "is the target's bos token"),
        ("<unk>", "is the target's unk token"),
        ("<reserved_9>", "did you mean '<reserved_"),
        ("~~~~", "take a reserved token such as"),
        (48, "outside the vocabulary of 48"),
    ],
)
def test_mask_tokens_refused(tiny_target: Path, tmp_path: Path, token: str | int, said: str) -> None:
    tokenizer = load(tiny_target, (0,), tmp_path).tokenizer
    with pytest.raises(InputError, match=said) as refused:
        resolve_mask_token(token, tokenizer, family("llama", 48))
    assert "<reserved_" in str(refused.value)


def test_masks_are_kept_for_the_layers_of_one_thread(tiny_target: Path, tmp_path: Path, rows: tuple[Any, Any]) -> None:
    target = load(tiny_target, (0, 2), tmp_path)
    wanted = target.features(*rows)
    given: list[Any] = []
    # after the target's own hooks: what the layer really gets
    target.model.model.layers[1].register_forward_pre_hook(
        lambda _m, _i, named: given.append(named["attention_mask"]), with_kwargs=True
    )
    kept: dict[int, Any] = {}
    with target.kept_masks(kept):
        first = target.features(*rows)
    assert torch.equal(first, wanted)
    assert sorted(kept) == [0, 1, 2]
    mark = torch.zeros(1, 1, 6, 6)
    kept[1] = mark
    with target.kept_masks(kept):
        target.features(*rows)
    target.features(*rows)
    assert given[1] is mark
    assert given[2] is not mark


def test_recorded_shapes_give_the_same_states(tiny_target: Path, tmp_path: Path, rows: tuple[Any, Any]) -> None:
    # on a CPU nothing is recorded, and the same way is taken
    target = load(tiny_target, (0, 2), tmp_path)
    recorded = RecordedTarget(target, [(2, 6), (2, 4)])
    first = recorded.features(*rows)
    kept = first.clone()
    assert torch.equal(first, target.features(*rows))
    short = (rows[0][:, :4], rows[1].clamp(max=4))
    assert torch.equal(recorded.features(*short), target.features(*short))
    recorded.features(rows[0].flip(0), rows[1].flip(0))
    assert torch.equal(first, kept), "a later batch wrote into an earlier one's states"


def test_a_recorded_forward_that_differs_is_refused(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(tiny_target, (0, 2), tmp_path)
    plain = RecordedPiece.__call__
    monkeypatch.setattr(RecordedPiece, "__call__", lambda self: tuple(each.flip(0) for each in plain(self)))
    with pytest.raises(CaptureError, match=r"forward of 2 x 6 tokens.*target_forward: eager"):
        RecordedTarget(target, [(2, 6)])
