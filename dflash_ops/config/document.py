"""YAML with line numbers: a safe subset of YAML 1.2, small and bounded.

PyYAML composes the nodes; values are made here, from the core schema only: `1e-3` is a number, `no` is text,
and no tag can make an object. Refused: duplicate keys, keys that are not text, foreign tags, halves of characters,
more than 1 MiB, 32 levels, 20 000 nodes (after aliases are expanded).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from dflash_ops.config.errors import ConfigError, Problem
from dflash_ops.config.places import shown

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 32
MAX_NODES = 20_000
LONGEST_SHOWN = 60

KeyPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_CORE = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)


class _Composer(yaml.SafeLoader):
    """Composes nodes with YAML 1.2 scalars and counts them."""

    # of its own: the base class's are YAML 1.1
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = 0
        self.nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        self.nodes += 1
        if self.depth > MAX_DEPTH or self.nodes > MAX_NODES:
            limit = f"nested deeper than {MAX_DEPTH} levels" if self.depth > MAX_DEPTH else f"over {MAX_NODES} values"
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=limit, problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _name, _pattern, _first in _CORE:
    _Composer.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


@dataclass(frozen=True)
class Document:
    """A parsed file: plain data, and for each key path the line it stands on."""

    file: str
    data: object
    lines: Mapping[KeyPath, int]

    def line(self, path: KeyPath) -> int | None:
        """The line of `path`, or of its nearest ancestor that has one."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path)

    def problem(self, path: KeyPath, message: str, hint: str = "") -> Problem:
        return Problem(self.file, self.line(path), message, hint)

    def part(self, path: KeyPath) -> Document:
        """The document of what stands at `path`."""
        data = self.data
        for key in path:
            data = data[key]  # type: ignore[index]
        depth = len(path)
        lines = {inner[depth:]: line for inner, line in self.lines.items() if inner[:depth] == path}
        return Document(self.file, data, lines)


def read_document(path: Path) -> Document:
    """Reads and parses a YAML file. Raises ConfigError."""
    name = shown(path)
    try:
        # a pipe that nobody writes to must not hold the command up
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError.one(name, None, "is no regular file")
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError.one(name, None, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError.one(ascii(str(path)), None, "is no name of a file") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError.one(name, None, f"is larger than {MAX_BYTES // 1024} KiB", "is this the right file?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError.one(name, raw[: error.start].count(b"\n") + 1, "is not UTF-8 text") from error
    return parse_document(text, name)


def parse_document(text: str, name: str) -> Document:
    """Parses YAML text; `name` stands for the file in errors. Raises ConfigError."""
    try:
        root = _Composer(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"not valid YAML: {error.problem or error.context}"
        raise ConfigError.one(name, mark.line + 1 if mark else None, message) from error
    except yaml.YAMLError as error:
        raise ConfigError.one(name, None, f"not valid YAML: {' '.join(str(error).split())}") from error
    if root is None:
        raise ConfigError.one(name, None, "is empty")
    maker = _Maker(name)
    data = maker.value(root, ())
    if maker.problems:
        raise ConfigError(maker.problems)
    return Document(name, data, maker.lines)


class _Maker:
    """Makes plain data of nodes, remembers lines and collects problems."""

    def __init__(self, name: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._name = name
        self._made = 0

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        self._made += 1
        if len(path) > MAX_DEPTH or self._made > MAX_NODES:
            raise ConfigError.one(self._name, line, "its anchors and aliases expand without bound")
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.value(item, (*path, number)) for number, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, line)
        self.problems.append(Problem(self._name, line, f"the tag {node.tag} is not allowed here"))
        return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        made: dict[str, object] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _TAG + "merge":
                merged.extend(value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node])
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                what = f"the key {key_node.value}" if isinstance(key_node, yaml.ScalarNode) else "a key"
                self.problems.append(Problem(self._name, line, f"{what} is not text", "put it in quotes"))
                continue
            key = self._text(key_node, line)
            here = (*path, key)
            if key in made:
                message = f"the key '{key}' stands here twice"
                self.problems.append(Problem(self._name, line, message, f"the first is on line {self.lines[here]}"))
                continue
            self.lines[here] = line
            made[key] = self.value(value_node, here)
        for base in merged:
            self._merge(base, path, made)
        return made

    def _merge(self, base: yaml.Node, path: KeyPath, into: dict[str, object]) -> None:
        if not isinstance(base, yaml.MappingNode):
            self.problems.append(Problem(self._name, base.start_mark.line + 1, "`<<` takes a mapping"))
            return
        inner = _Maker(self._name)
        inner._made = self._made
        for key, value in inner._mapping(base, path).items():
            if key not in into:
                into[key] = value
                here = (*path, key)
                self.lines.update({at: line for at, line in inner.lines.items() if at[: len(here)] == here})
        self._made = inner._made
        self.problems += inner.problems

    def _scalar(self, node: yaml.ScalarNode, line: int) -> object:
        text = str(node.value)
        kind = node.tag.removeprefix(_TAG)
        try:
            if kind == "str":
                return self._text(node, line)
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text, {"0x": 16, "0o": 8}.get(text[:2].lower(), 10))
            if kind == "float":
                return float(re.sub(r"(?i)^([-+]?)\.(inf|nan)$", r"\1\2", text))
        except (ValueError, KeyError):
            # Python makes no whole number of thousands of digits
            shown = text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
            self.problems.append(Problem(self._name, line, f"'{shown}' is not of the tag {node.tag}"))
            return None
        self.problems.append(Problem(self._name, line, f"the tag {node.tag} is not allowed here"))
        return None

    def _text(self, node: yaml.ScalarNode, line: int) -> str:
        """YAML's escapes can write half of a character (`\\ud800`), which no file name and no message can hold."""
        text = str(node.value)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"{ascii(text[error.start])[1:-1]} is half of a character"
            self.problems.append(Problem(self._name, line, message, "write the character itself, in UTF-8"))
        return text
