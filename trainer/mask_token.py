"""The mask token: one reserved token of the target's vocabulary that means "not yet drafted"."""

from __future__ import annotations

from typing import Any

from trainer.data import TrainingData, named_rows
from trainer.errors import InputError, nearest

_WHERE = "workload.mask_token"


def resolve_mask_token(token: str | int, tokenizer: Any, vocabulary: int) -> int:
    """The id of a token given by text or id. Raises `InputError` for one that is unknown, or has another meaning."""
    known: dict[str, int] = tokenizer.get_vocab()
    if isinstance(token, int):
        if token >= vocabulary:
            raise InputError(f"token id {token} is outside the vocabulary of {vocabulary}", _WHERE, _hint(tokenizer))
        found = token
    elif token in known:
        found = known[token]
    else:
        guess = nearest(token, known, cutoff=0.6)
        hint = f"did you mean {guess!r}?" if guess else _hint(tokenizer)
        raise InputError(f"the target has no token {token!r}", _WHERE, hint)
    for role in ("pad", "eos", "bos", "unk"):
        if getattr(tokenizer, f"{role}_token_id", None) == found:
            raise InputError(f"{token!r} is the target's {role} token", _WHERE, _hint(tokenizer))
    return found


def refuse_mask_in_data(mask_token: int, tokenizer: Any, data: TrainingData) -> None:
    """Raise `InputError` where the data contains the mask token."""
    rows = data.rows_with_token(mask_token)
    if rows:
        text = tokenizer.convert_ids_to_tokens(mask_token)
        raise InputError(
            f"the mask token {text!r} (id {mask_token}) occurs in the data: rows {named_rows(rows)}",
            _WHERE,
            _hint(tokenizer, besides=mask_token),
        )


def _hint(tokenizer: Any, besides: int | None = None) -> str:
    """Reserved tokens without a role, which is where a mask token is to be found."""
    taken = {getattr(tokenizer, f"{role}_token_id", None) for role in ("pad", "eos", "bos", "unk")} | {besides}
    free = [
        str(added) for index, added in sorted(tokenizer.added_tokens_decoder.items())
        if added.special and index not in taken
    ]  # fmt: skip
    return f"take a reserved token such as {', '.join(free[:6])}" if free else "take a token that no text uses"
