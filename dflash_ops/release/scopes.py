"""Which name is bound where in a Python file: scopes, as the language defines them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class Imported:
    """Bound by an import to this dotted name; a relative import begins with its dots."""

    name: str


@dataclass(frozen=True, eq=False)
class Parameter:
    """What the callers of `function` give for its parameter `name`."""

    function: Function
    name: str


@dataclass(frozen=True, eq=False)
class Element:
    """Some of what `iterable` holds: a loop variable, a part of an unpacked value."""

    iterable: ast.expr


@dataclass(frozen=True)
class Unknown:
    """Bound to something that the file does not show."""


Binding = Imported | Parameter | Element | Unknown | ast.expr | Definition


@dataclass(eq=False)
class Scope:
    """One module, class, function or comprehension. Class scopes are not seen from functions inside them."""

    node: ast.AST
    parent: Scope | None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    elsewhere: dict[str, Scope] = field(default_factory=dict)  # names declared global or nonlocal

    def bind(self, name: str, binding: Binding) -> None:
        self.elsewhere.get(name, self).bindings.setdefault(name, []).append(binding)

    def lookup(self, name: str) -> list[Binding]:
        """What `name` is bound to where it is read in this scope; empty: a builtin, or nothing."""
        scope = self.find(name)
        return scope.bindings[name] if scope is not None else []

    def find(self, name: str) -> Scope | None:
        """The scope that binds the `name` that is read in this one."""
        scope: Scope | None = self.elsewhere.get(name, self)
        while scope is not None:
            visible = scope is self or not isinstance(scope.node, ast.ClassDef)
            if visible and name in scope.bindings:
                return scope
            scope = scope.parent
        return None

    @property
    def module(self) -> Scope:
        return self if self.parent is None else self.parent.module


def build_scopes(tree: ast.Module) -> dict[ast.AST, Scope]:
    """The scope in which every node of the file is evaluated."""
    builder = _Builder()
    builder.visit_in(tree, Scope(tree, None))
    return builder.scopes


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes that run when `function` runs: not the bodies of functions and classes inside it."""
    waiting: list[ast.AST] = [function.body] if isinstance(function, ast.Lambda) else list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            waiting.extend(ast.iter_child_nodes(node))


class _Builder:
    def __init__(self) -> None:
        self.scopes: dict[ast.AST, Scope] = {}

    def visit_in(self, node: ast.AST, scope: Scope) -> None:
        self.scopes[node] = scope
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            self._function(node, scope)
        elif isinstance(node, ast.ClassDef):
            self._class(node, scope)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            self._children(node, Scope(node, scope))
        else:
            self._bind(node, scope)
            self._children(node, scope)

    def _children(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit_in(child, scope)

    def _function(self, node: Function, scope: Scope) -> None:
        inner = Scope(node, scope)
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for argument in every:
            if argument is not None:
                inner.bind(argument.arg, Parameter(node, argument.arg))
        # defaults, annotations and decorators are evaluated outside
        self.visit_in(arguments, scope)
        if isinstance(node, ast.Lambda):
            self.visit_in(node.body, inner)
            return
        scope.bind(node.name, node)
        for outside in [*node.decorator_list, *([node.returns] if node.returns else [])]:
            self.visit_in(outside, scope)
        for statement in node.body:
            self.visit_in(statement, inner)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        scope.bind(node.name, node)
        for outside in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit_in(outside, scope)
        inner = Scope(node, scope)
        for statement in node.body:
            self.visit_in(statement, inner)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                scope.bind(alias.asname or top, Imported(alias.name if alias.asname else top))
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (f"{node.module}." if node.module else "")
            for alias in node.names:
                scope.bind(alias.asname or alias.name, Imported(base + alias.name))
        elif isinstance(node, ast.Global):
            scope.elsewhere.update(dict.fromkeys(node.names, scope.module))
        elif isinstance(node, ast.Nonlocal):
            for name in node.names:
                scope.elsewhere[name] = _owner(name, scope)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, scope)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value, scope)
        elif isinstance(node, ast.NamedExpr):
            self._assign(node.target, node.value, _outside_comprehension(scope))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._assign(node.optional_vars, node.context_expr, scope)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self._assign(node.target, Element(node.iter), scope)
        elif isinstance(node, ast.AugAssign):
            self._assign(node.target, None, scope)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            scope.bind(node.name, Unknown())
        elif isinstance(node, ast.MatchMapping) and node.rest:
            scope.bind(node.rest, Unknown())

    def _assign(self, target: ast.expr, value: ast.expr | Element | None, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.bind(target.id, value if value is not None else Unknown())
        elif isinstance(target, (ast.Tuple, ast.List)):
            part_of = Element(value) if isinstance(value, ast.expr) else value
            values: Sequence[ast.expr | Element | None] = [part_of] * len(target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                starred = any(isinstance(part, ast.Starred) for part in [*target.elts, *value.elts])
                values = values if starred else value.elts
            for part, part_value in zip(target.elts, values, strict=True):
                self._assign(part, part_value, scope)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, value if isinstance(value, Element) else None, scope)


def _owner(name: str, scope: Scope) -> Scope:
    """The function around `scope` that binds a nonlocal name; what it binds later is found there too."""
    outer = scope.parent
    while outer is not None and outer.parent is not None:
        if not isinstance(outer.node, ast.ClassDef) and name in outer.bindings:
            return outer
        outer = outer.parent
    return scope


def _outside_comprehension(scope: Scope) -> Scope:
    while isinstance(scope.node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)) and scope.parent:
        scope = scope.parent
    return scope
