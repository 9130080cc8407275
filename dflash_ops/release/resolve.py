"""What an expression of a Python file refers to, told through its imports and plain aliases."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from dflash_ops.release.scopes import (
    Binding,
    Definition,
    Element,
    Function,
    Imported,
    Scope,
    build_scopes,
)

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_IMPORTERS = {"importlib.import_module", "builtins.__import__"}
_MAX_DEPTH = 20  # of aliases of aliases: more is a cycle


@dataclass(frozen=True, eq=False)
class Module:
    """One parsed file. Nothing of it is imported or run."""

    tree: ast.Module
    scopes: dict[ast.AST, Scope]
    names: dict[ast.expr, str | None] = field(default_factory=dict)  # found so far

    @classmethod
    def parse(cls, source: bytes) -> Module:
        """Raises SyntaxError."""
        tree = ast.parse(source)
        return cls(tree, build_scopes(tree))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def words(self) -> frozenset[str]:
        """Every identifier, attribute and imported name of the file."""
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.alias):
                found.add(node.name)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
        return frozenset(found)

    def name(self, node: ast.expr) -> str | None:
        """The dotted name, from the top-level package on, that `node` refers to (`torch.compile`, or
        `builtins.getattr`); None where the file does not tell, or tells several."""
        if node not in self.names:
            self.names[node] = None  # what an alias of itself finds
            self.names[node] = self._find_name(node)
        return self.names[node]

    def _find_name(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._bound_name(node)
        if isinstance(node, ast.Attribute):
            base = self.name(node.value)
            return f"{base}.{node.attr}" if base else None
        if isinstance(node, ast.NamedExpr):
            return self.name(node.value)
        if isinstance(node, ast.Call) and node.args:
            return self._called_name(node)
        if isinstance(node, ast.Subscript) and self.name(node.value) == "sys.modules":
            return text(node.slice)
        return None

    def imported(self, node: ast.Name) -> bool:
        """Whether the name is bound by imports only."""
        bindings = self.scopes[node].lookup(node.id)
        return bool(bindings) and all(isinstance(binding, Imported) for binding in bindings)

    def value(self, node: ast.expr) -> ast.expr:
        """The expression that a name was assigned, where there is exactly one; any other node is itself."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(node, ast.Name):
                break
            bindings = self.scopes[node].lookup(node.id)
            if len(bindings) != 1 or not isinstance(bindings[0], ast.expr):
                break
            node = bindings[0]
        return node

    def iterables(self, node: ast.Name) -> list[ast.expr]:
        """What a name runs over, where it is a loop variable."""
        return [each.iterable for each in self.scopes[node].lookup(node.id) if isinstance(each, Element)]

    def definitions(self, node: ast.expr) -> list[Definition]:
        """The functions and classes of this file that a name may refer to."""
        node = self.value(node)
        if isinstance(node, ast.Lambda):
            return [node]
        if not isinstance(node, ast.Name):
            return []
        kinds = (*_FUNCTIONS, ast.ClassDef)
        return [found for found in self.scopes[node].lookup(node.id) if isinstance(found, kinds)]

    def method_owner(self, function: Function) -> ast.ClassDef | None:
        """The class in whose body a function is defined."""
        around = self.scopes[function].node
        return around if isinstance(around, ast.ClassDef) else None

    def functions_around(self, node: ast.AST) -> Iterator[Function]:
        """The functions that must run for `node` to be evaluated, from the inside out."""
        scope: Scope | None = self.scopes[node]
        while scope is not None:
            if isinstance(scope.node, _FUNCTIONS):
                yield scope.node
            scope = scope.parent

    def class_around(self, node: ast.AST) -> ast.ClassDef | None:
        scope: Scope | None = self.scopes[node]
        while scope is not None:
            if isinstance(scope.node, ast.ClassDef):
                return scope.node
            scope = scope.parent
        return None

    def keywords(self, call: ast.Call) -> dict[str, ast.expr]:
        """The keyword arguments, those of `**{...}` and `**dict(...)` too where the file shows them."""
        found: dict[str, ast.expr] = {}
        for keyword in call.keywords:
            if keyword.arg is not None:
                found[keyword.arg] = keyword.value
            else:
                found.update(self.items(keyword.value))
        return found

    def items(self, node: ast.expr, depth: int = 0) -> dict[str, ast.expr]:
        """The text keys and the values of a dict display or a `dict(...)` call, through one name."""
        node = self.value(node)
        found: dict[str, ast.expr] = {}
        if depth > _MAX_DEPTH:
            return found
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    found.update(self.items(value, depth + 1))
                elif (name := text(key)) is not None:
                    found[name] = value
        elif isinstance(node, ast.Call) and self.name(node.func) == "builtins.dict":
            for argument in node.args[:1]:
                found.update(self.items(argument, depth + 1))
            for keyword in node.keywords:
                if keyword.arg is not None:
                    found[keyword.arg] = keyword.value
                else:
                    found.update(self.items(keyword.value, depth + 1))
        return found

    def _bound_name(self, node: ast.Name) -> str | None:
        bindings = self.scopes[node].lookup(node.id)
        if not bindings:
            return f"builtins.{node.id}"
        # `except ImportError: torch = None` does not make torch something else
        names = {self._binding_name(found) for found in bindings if not is_none(found)}
        return names.pop() if len(names) == 1 else None

    def _binding_name(self, binding: Binding) -> str | None:
        if isinstance(binding, Imported):
            return binding.name
        return self.name(binding) if isinstance(binding, ast.expr) else None

    def _called_name(self, call: ast.Call) -> str | None:
        function = self.name(call.func)
        if function in _IMPORTERS:
            return text(call.args[0])
        if function == "builtins.getattr" and len(call.args) >= 2:
            base, attribute = self.name(call.args[0]), text(call.args[1])
            return f"{base}.{attribute}" if base and attribute else None
        return None


def text(node: ast.expr) -> str | None:
    """The value of a string literal."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def is_none(node: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
