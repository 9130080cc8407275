"""The files of one release together: which dotted name is defined in which of them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cached_property
from pathlib import PurePosixPath

from dflash_ops.release.resolve import Module
from dflash_ops.release.scopes import Binding, Function, Imported

Found = tuple[Module, Binding]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_MAX_DEPTH = 10  # of re-exports: more is a cycle


class Program:
    """`files`: relative POSIX path to parsed file. Nothing is imported or run."""

    def __init__(self, files: Mapping[str, Module]) -> None:
        self.files = dict(files)
        packages = {str(PurePosixPath(path).parent) for path in files if PurePosixPath(path).name == "__init__.py"}
        self._by_name: dict[str, Module] = {}
        self._tests = {module for path, module in files.items() if _is_test(PurePosixPath(path))}
        self._package: dict[Module, str] = {}  # what a relative import starts from
        for path, module in sorted(files.items()):
            parts = list(PurePosixPath(path).with_suffix("").parts)
            is_package = parts[-1] == "__init__"
            first = len(parts) - 1
            while first > 0 and "/".join(parts[:first]) in packages:
                first -= 1
            names = parts[:-1] if is_package else parts
            self._by_name.setdefault(".".join(names[first:]), module)
            self._by_name.setdefault(".".join(names), module)
            self._package[module] = ".".join(names[first:] if is_package else names[first:-1])
        self.homes: dict[Function | ast.ClassDef, Module] = {
            node: module
            for module in files.values()
            for node in module.nodes
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef))
        }

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.homes if isinstance(node, ast.ClassDef)]

    def owner(self, function: Function) -> ast.ClassDef | None:
        """The class that `function` is a method of."""
        return self.homes[function].method_owner(function)

    def is_test(self, module: Module) -> bool:
        """Whether it is a test: what a test hands to the program is not what the program runs."""
        return module in self._tests

    def find(self, module: Module, dotted: str, depth: int = 0) -> list[Found]:
        """What the program binds to a dotted name that `module` uses, through re-exports; empty: another library's."""
        parts = self._absolute(module, dotted).split(".")
        for length in range(len(parts) - 1, 0, -1):
            home = self._by_name.get(".".join(parts[:length]))
            if home is not None:
                return [] if depth > _MAX_DEPTH else self._member(home, parts[length:], depth)
        return []

    def _member(self, home: Module, names: list[str], depth: int) -> list[Found]:
        found: list[Found] = []
        for binding in home.scopes[home.tree].bindings.get(names[0], []):
            if isinstance(binding, Imported):
                found += self.find(home, ".".join([binding.name, *names[1:]]), depth + 1)
            elif len(names) == 1:
                found.append((home, binding))
            elif len(names) == 2 and isinstance(binding, ast.ClassDef):
                found += [
                    (home, each)
                    for each in binding.body
                    if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and each.name == names[1]
                ]
        return found

    def _absolute(self, module: Module, dotted: str) -> str:
        name = dotted.lstrip(".")
        dots = len(dotted) - len(name)
        if not dots:
            return name
        package = self._package[module].split(".")
        return ".".join([*package[: len(package) - dots + 1], name])


def _is_test(path: PurePosixPath) -> bool:
    return bool({"tests", "test"} & set(path.parts)) or path.name.startswith(("test_", "conftest."))
