"""`--set key=value`: a playbook's settings, changed for one command."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_ops.config.document import Document, KeyPath, parse_document
from dflash_ops.config.errors import ConfigError, Problem, nearest
from dflash_ops.config.translate import Section, dotted, sections


@dataclass(frozen=True)
class Settings:
    """A document's data with the overrides in it, and where each overridden key came from."""

    data: dict[str, Any]
    document: Document
    origins: Mapping[KeyPath, Document]

    def locate(self, path: KeyPath) -> Document:
        """The option that set `path`, or the file."""
        for depth in range(len(path), 0, -1):
            if path[:depth] in self.origins:
                return self.origins[path[:depth]]
        return self.document


def override(document: Document, sets: Sequence[str], model: Section) -> Settings:
    """Puts each `key=value` of `sets` into the data. A short key (`steps`) will do where one section has it.

    Values are YAML scalars or flat lists. Raises ConfigError for other values, unknown and ambiguous keys.
    """
    if not isinstance(document.data, dict):
        raise ConfigError([document.problem((), "must be a mapping (key: value lines)")])
    data = copy.deepcopy(document.data)
    origins: dict[KeyPath, Document] = {}
    problems: list[Problem] = []
    for text in sets:
        try:
            path, origin = _parsed(text, model)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        *parents, key = path
        section = data
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                break
        # a section that is no mapping is told by the validation, at its line
        if isinstance(section, dict):
            section[key] = origin.data
            origins[path] = origin
    if problems:
        raise ConfigError(problems)
    return Settings(data, document, origins)


def _parsed(text: str, model: Section) -> tuple[KeyPath, Document]:
    label = f"--set {text}"
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError.one(label, None, "a value is missing", "write --set key=value")
    path = _resolve(key.strip(), model, label)
    if not value.strip():
        return path, Document(label, None, {})
    try:
        data = parse_document(value, label).data
    except ConfigError as error:
        hint = "put quotes around the value if text is meant"
        raise ConfigError(Problem(label, None, item.message, hint) for item in error.problems) from error
    if isinstance(data, dict) or (isinstance(data, list) and any(isinstance(item, dict | list) for item in data)):
        raise ConfigError.one(label, None, "takes one value or a flat list", "edit the playbook for more")
    return path, Document(label, data, {})


def _resolve(key: str, model: Section, label: str) -> KeyPath:
    tree = sections(model)
    leaves = {
        (*path, name) for path, section in tree.items() for name in section.model_fields if (*path, name) not in tree
    }
    wanted: KeyPath = tuple(key.split("."))
    if wanted in leaves:
        return wanted
    if wanted in tree:
        raise ConfigError.one(label, None, f"'{key}' is a section", f"name a key in it: {key}.KEY=value")
    # a section that is mostly left out is meant only where it is named
    short = {leaf for leaf in leaves if len(leaf) == 1 or model.model_fields[str(leaf[0])].default is not None}
    matches = sorted(dotted(leaf) for leaf in short if leaf[-1] == key)
    if len(matches) == 1:
        return tuple(matches[0].split("."))
    if matches:
        raise ConfigError.one(label, None, f"'{key}' is ambiguous", f"write {' or '.join(matches)}")
    # a near key keeps the section that was named, if one was
    near = {dotted(leaf) for leaf in leaves} if "." in key else {str(leaf[-1]) for leaf in short}
    hint = nearest(key, near)
    raise ConfigError.one(label, None, f"unknown key '{key}'", hint if hint.startswith("did") else "")
