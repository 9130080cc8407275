"""Tokenizers with chat templates of the kinds that targets have, small enough to be made in a test."""

from __future__ import annotations

from typing import Any

CHATML_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As SmolLM2: a system message of its own where there is none, a line break behind each turn's end."""

HEADERS = (
    "{% for message in messages %}"
    "{% set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim "
    "+ '<|eot_id|>' %}{{ bos_token + text if loop.first else text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
"""As Llama-3: the start token from the template, contents trimmed."""

THINKING = (
    "{%- set last = namespace(user=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') "
    "if '</think>' in message.content else '' %}"
    "{%- if loop.index0 > last.user and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}{{- said }}"
    "{%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""As Qwen3: reasoning only in the last answer, an empty one where it has none; left out of earlier answers."""

SWITCHED = THINKING.replace(
    "assistant\\n' }}{%- endif %}",
    "assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}",
)
"""As Qwen3 with its switch: without thinking, the prompt itself ends with an empty thought."""

BARE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""No token ends a turn."""

ALTERNATING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + BARE
"""As Gemma: the template itself refuses some conversations."""

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|bos|>"]


def byte_tokenizer(template: str | None, *, end: str = "<|im_end|>") -> Any:
    """Bytes and two merges: a line break twice, and `ok`; so a border inside a merge can be met.

    Text is split as Llama-3 and Qwen3 do: line breaks stay together.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u010a", "\u010a"), ("o", "k")]
    vocabulary = {each: index for index, each in enumerate([*letters, *("".join(each) for each in merges)])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    lines_first = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)|\s+|\S+"), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([lines_first, to_bytes])
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<|bos|>", eos_token=end)
    tokenizer.chat_template = template
    return tokenizer
