"""Arguments as Perl's Getopt::Long and PVE::JSONSchema take them: options anywhere, abbreviations, `--` ends them."""

from __future__ import annotations

import sys
from typing import NamedTuple

from pctlib.errors import PctError

USAGE_ERROR = 2


class Command(NamedTuple):
    """One command's arguments: how many after the vmid, its options, and whether more may follow."""

    usage: str
    positional: int = 0
    options: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # options whose value may be left out
    extra: bool = False
    takes_vmid: bool = True


class Parsed(NamedTuple):
    vmid: str
    positional: list[str]
    extra: list[str]
    options: dict[str, str]


def _option_name(word: str, known: tuple[str, ...]) -> str | None:
    lowered = word.lower()
    if lowered in known:
        return lowered
    near = [name for name in known if name.startswith(lowered)]
    return near[0] if len(near) == 1 else None


def parse(command: Command, words: list[str]) -> Parsed:
    """Raise PctError with pct's own text and status 2 when the words do not fit the command."""
    known = command.options + command.flags
    plain: list[str] = []
    options: dict[str, str] = {}
    broken = False
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            plain += rest
            break
        if not word.startswith("-") or word == "-":
            plain.append(word)
            continue
        given, has_value, value = word.lstrip("-").partition("=")
        name = _option_name(given, known)
        if name is None:
            print(f"Unknown option: {given.lower()}", file=sys.stderr)
            broken = True
        elif has_value:
            options[name] = value
        elif rest and (name in command.options or not rest[0].startswith("-")):
            options[name] = rest.pop(0)
        elif name in command.flags:
            options[name] = "1"
        else:
            print(f"Option {given} requires an argument", file=sys.stderr)
            broken = True
    if broken:
        raise PctError(f"400 unable to parse option\n{command.usage}", USAGE_ERROR)
    wanted = command.positional + command.takes_vmid
    if len(plain) < wanted:
        raise PctError(f"400 not enough arguments\n{command.usage}", USAGE_ERROR)
    if len(plain) > wanted and not command.extra:
        raise PctError(f"400 too many arguments\n{command.usage}", USAGE_ERROR)
    vmid = plain.pop(0) if command.takes_vmid else ""
    if command.takes_vmid and not vmid.isdecimal():
        raise PctError(
            f"400 Parameter verification failed.\nvmid: type check ('integer') failed - got '{vmid}'\n{command.usage}",
            USAGE_ERROR,
        )
    return Parsed(vmid, plain[: command.positional], plain[command.positional :], options)
