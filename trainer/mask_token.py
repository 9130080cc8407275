"""The mask token: one reserved token of the target's vocabulary that means "not yet drafted"."""

from __future__ import annotations

from typing import Any

from trainer.data import TrainingData, named_rows
from trainer.errors import InputError, nearest

_WHERE = "workload.mask_token"
_AUTO = "auto"
# the ids of z-lab's released drafters, by the target's model_type: Qwen3, Qwen3.5 to 3.8, MiniMax-M2.7, Kimi-K2.7
_FAMILIES = {
    **dict.fromkeys(("qwen3", "qwen3_moe"), 151669),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), 248070),
    "minimax_m2": 200054,
    **dict.fromkeys(("kimi_k2", "kimi_k25"), 163838),
}


def resolve_mask_token(token: str | int, tokenizer: Any, config: Any) -> int:
    """The id of a token given by text or id, or of the target's family where it says "auto".

    `config` is the target's. Raises `InputError` for a token that is unknown, or has another meaning.
    """
    known: dict[str, int] = tokenizer.get_vocab()
    vocabulary = int(config.vocab_size)
    hint = _hint(tokenizer, vocabulary)
    if token == _AUTO:
        found = _of_family(config.model_type, tokenizer, vocabulary)
    elif isinstance(token, int):
        if token >= vocabulary:
            raise InputError(f"token id {token} is outside the vocabulary of {vocabulary}", _WHERE, hint)
        found = token
    elif token in known:
        found = known[token]
    else:
        guess = nearest(token, known, cutoff=0.6)
        raise InputError(f"the target has no token {token!r}", _WHERE, f"did you mean {guess!r}?" if guess else hint)
    for role in ("pad", "eos", "bos", "unk"):
        if getattr(tokenizer, f"{role}_token_id", None) == found:
            raise InputError(f"{token!r} (id {found}) is the target's {role} token", _WHERE, hint)
    return found


def _of_family(family: str, tokenizer: Any, vocabulary: int) -> int:
    """The id that released drafters of this family use, where this target has kept it free. Raises `InputError`.

    Free is a reserved token, or a row of the embedding that is no token of the tokenizer.
    """
    hint = _hint(tokenizer, vocabulary)
    found = _FAMILIES.get(family)
    if found is None:
        raise InputError(f"no mask token is known for the model family {family!r}", _WHERE, hint)
    if found >= vocabulary:
        raise InputError(
            f"the mask token of the family {family!r}, id {found}, is outside this target's vocabulary of {vocabulary}",
            _WHERE,
            hint,
        )
    text = {each: name for name, each in tokenizer.get_vocab().items()}.get(found)
    reserved = tokenizer.added_tokens_decoder.get(found)
    if text is not None and not (reserved is not None and reserved.special):
        raise InputError(
            f"the mask token of the family {family!r}, id {found}, is the ordinary token {text!r} here", _WHERE, hint
        )
    return found


def refuse_mask_in_data(mask_token: int, tokenizer: Any, vocabulary: int, data: TrainingData) -> None:
    """Raise `InputError` where the data contains the mask token."""
    rows = data.rows_with_token(mask_token)
    if rows:
        raise InputError(
            f"the mask token (id {mask_token}) occurs in the data: rows {named_rows(rows)}",
            _WHERE,
            _hint(tokenizer, vocabulary, besides=mask_token),
        )


def _hint(tokenizer: Any, vocabulary: int, besides: int | None = None) -> str:
    """Where a mask token is to be found: ids that are no token, and reserved tokens without a role."""
    # a tokenizer may have ids above its count, where it left some out
    spare = max(tokenizer.get_vocab().values(), default=-1) + 1
    if spare < vocabulary and spare != besides:
        return f"take an id that is no token of the tokenizer, such as {spare} (up to {vocabulary - 1})"
    taken = {getattr(tokenizer, f"{role}_token_id", None) for role in ("pad", "eos", "bos", "unk")} | {besides}
    free = [
        str(added) for index, added in sorted(tokenizer.added_tokens_decoder.items())
        if added.special and index not in taken
    ]  # fmt: skip
    return f"take a reserved token such as {', '.join(free[:6])}" if free else "take a token that no text uses"
