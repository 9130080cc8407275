"""The target: a table of next tokens, with a hidden state for each token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .assets import resolve
from .errors import InputError, nearest


@dataclass(frozen=True)
class Target:
    """`next[token]` is the target's greedy choice, `hidden[token]` its state ([V] and [V, D])."""

    tokens: list[str]
    pad: int
    bos: int
    eos: int
    next: list[int]
    hidden: list[list[float]]
    source: Path

    @property
    def width(self) -> int:
        """Length D of a hidden state."""
        return len(self.hidden[0])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's words; a word outside the vocabulary gets a stable id of a known one."""
        known = {word: index for index, word in enumerate(self.tokens)}
        first = max(self.pad, self.bos, self.eos) + 2  # words start after the specials and the reserved token
        rest = len(self.tokens) - first
        words = [known.get(word, first + sum(word.encode()) % rest) for word in text.split()]
        return [self.bos, *words]

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """Return the greedy continuation: at most `count` tokens, ending with eos where it comes."""
        out: list[int] = []
        last = prompt[-1]
        while len(out) < count and (not out or last != self.eos):
            last = self.next[last]
            out.append(last)
        return out


def load_target(name: str) -> Target:
    """Load `workload.target`: a JSON file, or a folder that holds `target.json`."""
    where = "workload.target"
    path = resolve(name, where)
    path = path / "target.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        target = Target(source=path, **raw)
        size, width = len(target.tokens), len(target.hidden[0])
        whole = len(target.next) == len(target.hidden) == size
        whole = whole and all(len(row) == width for row in target.hidden)
        whole = whole and all(0 <= token < size for token in target.next)
    except (OSError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"cannot read the target: {error}", f"{where}: {path}", "give a tiny target") from error
    if not whole:
        raise InputError("the target's tables do not fit each other", f"{where}: {path}", "repair the file")
    return target


def mask_id(target: Target, token: str | int) -> int:
    """Resolve `workload.mask_token`; pad, eos and bos are refused."""
    where = "workload.mask_token"
    if isinstance(token, str) and token not in target.tokens:
        raise InputError(f"{token!r} is no token of the target", where, nearest(token, target.tokens))
    index = target.tokens.index(token) if isinstance(token, str) else token
    if index >= len(target.tokens):
        raise InputError(f"id {index} is outside the vocabulary", where, f"give 0 to {len(target.tokens) - 1}")
    if index in (target.pad, target.eos, target.bos):
        raise InputError(f"{target.tokens[index]!r} is pad, eos or bos", where, "give a reserved token")
    return index
