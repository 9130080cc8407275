"""What a class keeps in its objects."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from dflash_ops.release.scopes import own_nodes

_METHODS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Fields:
    """What is assigned to the attributes of a class's objects, and into the containers in them."""

    values: dict[str, list[ast.expr]] = field(default_factory=dict)
    elements: dict[str, list[ast.expr]] = field(default_factory=dict)


def fields_of(owner: ast.ClassDef) -> Fields:
    found = Fields()
    for part in owner.body:
        if isinstance(part, ast.Assign):
            for target in part.targets:
                if isinstance(target, ast.Name):
                    found.values.setdefault(target.id, []).append(part.value)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.value is not None:
            found.values.setdefault(part.target.id, []).append(part.value)
        elif isinstance(part, _METHODS):
            own = (part.args.posonlyargs + part.args.args)[:1]
            if own:
                _note_fields(part, own[0].arg, found)
    return found


def _note_fields(method: ast.FunctionDef | ast.AsyncFunctionDef, own: str, found: Fields) -> None:
    for node in own_nodes(method):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _note_target(target, node.value, own, found)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            _note_target(node.target, node.value, own, found)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            held = _own_attribute(node.func.value, own)
            if held is not None and node.func.attr in {"append", "add", "setdefault"}:
                found.elements.setdefault(held, []).append(node.args[-1])


def _note_target(target: ast.expr, value: ast.expr, own: str, found: Fields) -> None:
    held = _own_attribute(target, own)
    if held is not None:
        found.values.setdefault(held, []).append(value)
    elif isinstance(target, ast.Subscript):
        held = _own_attribute(target.value, own)
        if held is not None:
            found.elements.setdefault(held, []).append(value)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for part, part_value in zip(target.elts, value.elts, strict=True):
            _note_target(part, part_value, own, found)


def _own_attribute(node: ast.expr, own: str) -> str | None:
    """`self.x` gives x."""
    plain = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own
    return node.attr if plain else None  # type: ignore[attr-defined]
