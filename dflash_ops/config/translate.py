"""pydantic's errors in a reader's words, at the line that they are about."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dflash_ops.config.base import SECTIONS, Model
from dflash_ops.config.document import Document, KeyPath
from dflash_ops.config.errors import ConfigError, Problem, nearest

Loaded = TypeVar("Loaded", bound=Model)
Section = type[BaseModel]

_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a section (key: value lines)",
    "model_attributes_type": "a section (key: value lines)",
}
_QUOTED = re.compile(r"'([^' ]+)'")
_LIMITS: dict[str, tuple[str, str]] = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("greater than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}

Locate = Callable[[KeyPath], Document]
"""Which document a key path came from: the file, or an option of the command line."""


def validated(model: type[Loaded], data: object, locate: Locate, more: Sequence[Problem] = ()) -> Loaded:
    """The model, or ConfigError with every problem (`more`: those that the caller found itself)."""
    problems = list(more)
    try:
        made = model.model_validate(data)
    except ValidationError as error:
        problems += problems_of(error, model, data, locate)
    if problems:
        raise ConfigError(problems)
    return made


def problems_of(error: ValidationError, model: Section, data: object, locate: Locate) -> Iterator[Problem]:
    """One problem for each key path; the branches of a union (`int | str`) are told as one."""
    found: dict[KeyPath, list[ErrorDetails]] = {}
    branched: set[KeyPath] = set()
    for detail in error.errors(include_url=False):
        if detail["type"] == SECTIONS:
            continue
        path = _path_in(data, detail["loc"])
        if len(path) < len(detail["loc"]) and detail["type"] != "missing":
            branched.add(path)
        found.setdefault(path, []).append(detail)
    for path, details in found.items():
        deeper = any(other != path and other[: len(path)] == path for other in found)
        if path in branched and deeper:
            continue
        yield _told(details, path, model, data, locate)


def _path_in(data: Any, location: tuple[int | str, ...]) -> KeyPath:
    """`location` without what is not in the data: names of union branches, the name of a missing key."""
    path: list[int | str] = []
    for key in location:
        in_mapping = isinstance(data, dict) and key in data
        in_list = isinstance(data, list) and isinstance(key, int) and key < len(data)
        if in_mapping or in_list:
            data = data[key]
            path.append(key)
    return tuple(path)


def _told(details: list[ErrorDetails], path: KeyPath, model: Section, data: object, locate: Locate) -> Problem:
    document = locate(path)
    first = details[0]
    if first["type"] == "extra_forbidden":
        return _unknown(document, path, model)
    if first["type"] == "missing":
        if isinstance(first["loc"][-1], int):
            return document.problem(path, f"{dotted(path)} has too few entries: {_value(_at(data, path))}")
        names = [str(detail["loc"][-1]) for detail in details]
        keys = ", ".join(f"'{name}'" for name in names)
        return document.problem(path, f"{keys} {'are' if len(names) > 1 else 'is'} required{_within(path)}")
    limits = _range(model, path)
    words = list(dict.fromkeys(filter(None, (_expected(detail, limits) for detail in details))))
    place, given = dotted(path), _at(data, path)
    if first["loc"][-1] == "[key]":
        place, given = f"a key of {dotted(path[:-1])}", path[-1]
    hint = _hint(details, given)
    if words:
        # what stands among secrets may be one
        hidden = path[:1] == ("secrets",) or path == ("notify", "webhook")
        instead = "what stands there" if hidden and place == dotted(path) else _value(given)
        message = f"{place} must be {' or '.join(words)}, not {instead}"
    elif first["type"] == "value_error":
        text = str(first["ctx"]["error"])
        message = f"{place} {text}"
    else:
        message = f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return document.problem(path, message, hint)


def _expected(detail: ErrorDetails, limits: str) -> str:
    kind = detail["type"]
    context = detail.get("ctx", {})
    if kind in _KINDS:
        return _KINDS[kind]
    if kind in _LIMITS:
        words, key = _LIMITS[kind]
        return limits or f"{words} {_number(context[key])}"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "finite_number":
        return "a finite number"
    if kind == "too_short":
        return f"a list of at least {context['min_length']}"
    if kind == "too_long":
        return f"a list of at most {context['max_length']}"
    if kind == "value_error" and str(context["error"]).startswith("must be "):
        return str(context["error"]).removeprefix("must be ")
    return ""


def _range(model: Section, path: KeyPath) -> str:
    """`from 1 to 1000000000`: of what may stand at `path`; empty where it is not bounded on both sides."""
    keys = [key for key in path if not isinstance(key, int)]
    section = _section_at(model, tuple(keys[:-1])) or _entry_at(model, tuple(keys[:-1]))
    field = section.model_fields.get(str(keys[-1])) if section and keys else None
    found = {} if field is None else _bounds(field.metadata) | _bounds_in(field.annotation)
    low, high = found.get("ge", found.get("gt")), found.get("le", found.get("lt"))
    if low is None or high is None:
        return ""
    if "ge" in found and "le" in found:
        return f"from {_number(low)} to {_number(high)}"
    above, below = ("at least" if "ge" in found else "greater than"), ("at most" if "le" in found else "less than")
    return f"{above} {_number(low)} and {below} {_number(high)}"


def _bounds_in(annotation: object) -> dict[str, Any]:
    """Of the numbers in a type, however deep."""
    found: dict[str, Any] = {}
    for inner in getattr(annotation, "__metadata__", ()):
        found |= _bounds(inner.metadata if isinstance(inner, FieldInfo) else [inner])
    for inner in typing.get_args(annotation):
        found |= _bounds_in(inner)
    return found


def _bounds(metadata: list[Any]) -> dict[str, Any]:
    return {name: getattr(one, name) for one in metadata for name in ("ge", "gt", "le", "lt") if hasattr(one, name)}


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _hint(details: list[ErrorDetails], given: object) -> str:
    kinds = {detail["type"] for detail in details}
    if isinstance(given, str) and "literal_error" in kinds:
        allowed = [word for detail in details for word in _QUOTED.findall(str(detail.get("ctx", {})))]
        near = nearest(given, allowed)
        return near if near.startswith("did you mean") else ""
    if "string_type" in kinds and isinstance(given, bool | int | float | list):
        return "put it in quotes if text is meant"
    return ""


def _unknown(document: Document, path: KeyPath, model: Section) -> Problem:
    *parents, key = path
    section = _section_at(model, tuple(parents)) or _entry_at(model, tuple(parents))
    known = list(section.model_fields) if section else []
    homes = [
        home for home in sections(model) if home != tuple(parents) and str(key) in sections(model)[home].model_fields
    ]
    if homes and key not in known:
        hint = f"it belongs in {dotted(homes[0]) or 'the top level'}"
    else:
        hint = nearest(str(key), known)
    return document.problem(path, f"unknown key '{key}'{_within(tuple(parents))}", hint)


def sections(model: Section) -> dict[KeyPath, Section]:
    """Every section of a model by its path; the model itself is at ()."""
    found: dict[KeyPath, Section] = {(): model}
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner:
            found |= {(name, *path): section for path, section in sections(inner).items()}
    return found


def _section_at(model: Section, path: KeyPath) -> Section | None:
    return sections(model).get(path)


def _entry_at(model: Section, path: KeyPath) -> Section | None:
    """The model of an entry that a person names: `assets.NAME`."""
    field = model.model_fields.get(str(path[0])) if len(path) == 2 else None
    return _model_in(typing.get_args(field.annotation)[1]) if field and _is_table(field.annotation) else None


def _is_table(annotation: object) -> bool:
    return typing.get_origin(annotation) is dict


def _model_in(annotation: object) -> Section | None:
    if _is_table(annotation):
        return None
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _at(data: object, path: KeyPath) -> object:
    for key in path:
        data = data[key]  # type: ignore[index]
    return data


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "a section"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _within(path: KeyPath) -> str:
    return f" in {dotted(path)}" if path else ""


def dotted(path: KeyPath) -> str:
    """`workload.buckets[0]`"""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text
