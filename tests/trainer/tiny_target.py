"""A real target, small enough for tests: a random Llama with a real tokenizer and chat template, written to disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch

WORDS = [f"w{index}" for index in range(40)]
SPECIAL = ["<unk>", "<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<reserved_0>", "<reserved_1>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 48 tokens, `SPECIAL` before `WORDS`, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def build_tiny_target(folder: Path, *, layers: int = 5, hidden_size: int = 32, seed: int = 3) -> Path:
    """Write the target into `folder`: 48 tokens, `layers` layers of four heads, greedy answers that repeat."""
    from transformers import LlamaConfig, LlamaForCausalLM

    save_tiny_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=3,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    torch.random.set_rng_state(state)
    with torch.no_grad():
        # answers are made of words: no special token is ever the most likely one
        model.lm_head.weight[: len(SPECIAL)] = 0.0
    model.save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int, *, words: int = 3) -> Path:
    """`count` different short prompts as JSON lines."""
    lines = [
        json.dumps({"prompt": " ".join(WORDS[(7 * row + 3 * index) % len(WORDS)] for index in range(words))})
        for row in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
