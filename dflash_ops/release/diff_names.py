"""The file names in a diff's header lines: git's quoting, its prefixes, and what a path may look like."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import permutations

_ESCAPES = {
    b"a": b"\a",
    b"b": b"\b",
    b"t": b"\t",
    b"n": b"\n",
    b"v": b"\v",
    b"f": b"\f",
    b"r": b"\r",
    b'"': b'"',
    b"\\": b"\\",
}
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
# a/ b/ by default, the others with diff.mnemonicPrefix (commit, index, object, work tree)
_PREFIXES = [(old + b"/", new + b"/") for old, new in permutations((b"a", b"b", b"c", b"i", b"o", b"w"), 2)]


class BadNameError(ValueError):
    """A name that does not say which file of the release is meant; the text says why."""


@dataclass(frozen=True)
class Names:
    """Paths inside the release, and the prefixes that stood before them in the diff."""

    old: str
    new: str
    prefixes: tuple[bytes, bytes]


def unquote(name: bytes) -> bytes:
    """A name as git writes it: C-quoted where it has unusual bytes. Raises BadNameError."""
    if not name.startswith(b'"'):
        return name
    match = _QUOTED.fullmatch(name)
    if match is None:
        raise BadNameError("a quoted file name does not end")

    def replace(escape: re.Match[bytes]) -> bytes:
        code = escape[1]
        if len(code) == 3:
            return bytes([int(code, 8) & 0xFF])
        if code not in _ESCAPES:
            raise BadNameError("a quoted file name has an unknown escape")
        return _ESCAPES[code]

    return _ESCAPE.sub(replace, match[1])


def side_name(text: bytes) -> bytes | None:
    """The name in a `---` or `+++` line (what follows the first blank); None is /dev/null. Raises BadNameError."""
    quoted = _QUOTED.match(text)
    name = unquote(quoted[0]) if quoted else text.split(b"\t", 1)[0]
    return None if name == b"/dev/null" else name


def release_path(name: bytes, prefix: bytes = b"") -> str:
    """The name without its prefix as a path inside the release. Raises BadNameError where it leaves the release."""
    if not name.startswith(prefix):
        raise BadNameError(f"{_show(name)} lacks the prefix {_show(prefix)} of the other name")
    try:
        path = name[len(prefix) :].decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadNameError(f"the name {_show(name)} is not UTF-8") from error
    parts = path.split("/")
    if any(part in {"", ".", ".."} for part in parts) or ".git" in parts:
        raise BadNameError(f"{_show(name)} is no path inside the release")
    return path


def git_names(rest: bytes, old: bytes | None, new: bytes | None) -> Names:
    """The names of a `diff --git` line (`rest` follows these words) with the ones of its `rename from`/`to` or
    `copy from`/`to` lines, which have no prefix. Raises BadNameError."""
    pairs = _splits(rest)
    if old is not None and new is not None:
        bare = (unquote(old), unquote(new))
        for prefixes in [(b"", b""), *_PREFIXES]:
            if (prefixes[0] + bare[0], prefixes[1] + bare[1]) in pairs:
                return Names(release_path(bare[0]), release_path(bare[1]), prefixes)
    elif old is None and new is None:
        for prefixes in [(b"", b""), *_PREFIXES]:
            for left, right in pairs:
                if left.startswith(prefixes[0]) and right.startswith(prefixes[1]):
                    name = left[len(prefixes[0]) :]
                    if name == right[len(prefixes[1]) :]:
                        return Names(release_path(name), release_path(name), prefixes)
    raise BadNameError("its `diff --git` line does not name one file (or its rename lines do not agree)")


def plain_names(old: bytes | None, new: bytes | None) -> Names:
    """The names of a --- and a +++ line (None: /dev/null, for both sides' sake the other's name is used) with
    or without a/ and b/. Raises BadNameError."""
    if old is not None and new is not None:
        prefixes = (b"a/", b"b/") if old.startswith(b"a/") and new.startswith(b"b/") else (b"", b"")
        names = Names(release_path(old, prefixes[0]), release_path(new, prefixes[1]), prefixes)
        if names.old != names.new:
            raise BadNameError(f"names two files, {names.old} and {names.new}")
        return names
    told, prefix = (new, b"b/") if old is None else (old, b"a/")
    if told is None:
        raise BadNameError("both sides are /dev/null")
    path = release_path(told, prefix if told.startswith(prefix) else b"")
    return Names(path, path, (b"", b""))


def _splits(rest: bytes) -> list[tuple[bytes, bytes]]:
    """Every way to read two names out of a `diff --git` line: blanks may be part of a name."""
    quoted = _QUOTED.match(rest)
    if quoted and rest[quoted.end() : quoted.end() + 1] == b" ":
        return [(unquote(quoted[0]), unquote(rest[quoted.end() + 1 :]))]
    pairs = []
    for match in re.finditer(rb" ", rest):
        right = rest[match.end() :]
        if not right.startswith(b'"') or _QUOTED.fullmatch(right):
            pairs.append((rest[: match.start()], unquote(right)))
    return pairs


def _show(name: bytes) -> str:
    return ascii(name.decode("utf-8", "replace"))
