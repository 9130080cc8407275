"""A lock: pip's requirements format with every package pinned to a version and hashed. Shared with the client."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterator, List, Optional, Tuple

from .files import digest_of

MAX_BYTES = 4 * 1024 * 1024
_MAKE_ONE = "make it with: uv pip compile --generate-hashes, or pip-compile --generate-hashes --allow-unsafe"
_SOURCES = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--trusted-host")
_HARMLESS = ("--only-binary", "--prefer-binary", "--pre")
_COMMENT = re.compile(r"(^|\s+)#.*$")
_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?:\[[A-Za-z0-9,._ -]*\])?"
    r"\s*={2,3}\s*(?P<version>[^\s;*,@]+)\s*(?:;.*)?"
)
_HASH = re.compile(r"--hash[= ](sha256:[0-9a-f]{64}|sha384:[0-9a-f]{96}|sha512:[0-9a-f]{128})")
_CREDENTIALS = re.compile(r"://[^/\s]*@")


class BadLock(ValueError):  # noqa: N818
    """It fixes nothing, or more than packages. `line` counts from 1; `hint` is what to do about it."""

    def __init__(self, line: int, what: str, hint: str) -> None:
        super().__init__(what)
        self.line, self.what, self.hint = line, what, hint


@dataclass(frozen=True)
class Pin:
    """`name` in its normal spelling; `text` as pip reads it, with its hashes, in one line."""

    name: str
    version: str
    text: str


@dataclass(frozen=True)
class Lock:
    pins: Tuple[Pin, ...]
    sources: Tuple[str, ...]
    """Options that say where packages are found: what is found is told by its hash."""

    @property
    def digest(self) -> str:
        """Of what it installs: neither comments, nor the order, nor where it comes from."""
        return digest_of(sorted(pin.text for pin in self.pins))

    def requirements(self, *, sources: bool) -> str:
        """The text of a requirements file; `sources`: with the options that name indexes."""
        lines = [*(self.sources if sources else ()), *(pin.text for pin in self.pins)]
        return "".join(f"{line}\n" for line in lines)


def normal_name(name: str) -> str:
    """A package's name as PEP 503 spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_lock(text: str) -> Lock:
    """Raises BadLock for the first line that is no pinned and hashed package."""
    if len(text) > MAX_BYTES:
        raise BadLock(1, f"it is larger than {MAX_BYTES >> 20} MiB", _MAKE_ONE)
    pins: List[Pin] = []
    sources: List[str] = []
    for number, line in _lines(text):
        if line.startswith("-"):
            source = _option(number, line)
            if source is not None:
                sources.append(source)
        else:
            pins.append(_pin(number, line))
    if not pins:
        raise BadLock(1, "it names no package", _MAKE_ONE)
    return Lock(tuple(pins), tuple(sources))


def _lines(text: str) -> Iterator[Tuple[int, str]]:
    """Lines as pip joins them, without comments and spare spaces; with the number of the first."""
    begun: Optional[int] = None
    parts: List[str] = []
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        is_comment = _COMMENT.match(raw) is not None
        goes_on = raw.endswith("\\") and not is_comment
        parts.append(_COMMENT.sub("", raw[:-1] if goes_on else raw))
        begun = number if begun is None else begun
        if goes_on:
            continue
        line = " ".join(" ".join(parts).split())
        if line:
            yield begun, line
        begun, parts = None, []


def _option(number: int, line: str) -> Optional[str]:
    """The line where it says where packages come from; None where it says nothing that we do not say ourselves."""
    name = re.split(r"[= ]", line, maxsplit=1)[0]
    if _CREDENTIALS.search(line):
        raise BadLock(
            number,
            f"{name} carries a user name or a password",
            "leave it out, and give the whole URL as the secret PIP_INDEX_URL or PIP_EXTRA_INDEX_URL of the host",
        )
    if name in _SOURCES:
        # pip-compile writes down its own configuration: folders of this machine say nothing to the host
        here = name != "--trusted-host" and re.search(r"[= ](?!file:)[a-z+]+://", line) is None
        return None if here else line
    if name in _HARMLESS:
        return None
    if name in ("-e", "--editable"):
        hint = "the trainer's own source is the release: leave it out (uv export --no-emit-project)"
    elif name in ("-r", "--requirement", "-c", "--constraint"):
        hint = f"a lock is one file that stands alone: {_MAKE_ONE}"
    else:
        hint = f"only packages and {', '.join(_SOURCES)} may stand in a lock"
    raise BadLock(number, f"the option {name} is not possible here", hint)


def _pin(number: int, line: str) -> Pin:
    wanted, *options = re.split(r"\s+(?=--)", line)
    found = _PIN.fullmatch(wanted)
    if line.startswith(("[", "lock-version")):
        raise BadLock(number, "this is TOML, not pip's requirements format", _MAKE_ONE)
    if found is None:
        raise BadLock(number, f"{wanted!r:.80} is not pinned as name==version", _MAKE_ONE)
    hashes = []
    for option in options:
        match = _HASH.fullmatch(option)
        if match is None:
            raise BadLock(number, f"{option!r:.80} is no hash (--hash=sha256:...)", _MAKE_ONE)
        hashes.append(f"--hash={match[1]}")
    if not hashes:
        raise BadLock(number, f"{wanted!r:.80} has no hash", _MAKE_ONE)
    return Pin(normal_name(found["name"]), found["version"], " ".join([wanted, *sorted(hashes)]))
