"""Which functions, classes and compiled functions of a program an expression may stand for.

Followed: imports, aliases, arguments, fields, returned values, containers, across files. What is not followed is
missing from the answer: a set that is empty says "not known", one that is not says "at least these".
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dflash_ops.release.fields import fields_of
from dflash_ops.release.program import Program
from dflash_ops.release.resolve import Module
from dflash_ops.release.scopes import Binding, Element, Function, Imported, Parameter, own_nodes
from dflash_ops.release.sites import Site, handed_over

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_METHODS = (ast.FunctionDef, ast.AsyncFunctionDef)
_PROPERTIES = {"builtins.property", "functools.cached_property"}
_COPIES = {"builtins.list", "builtins.tuple", "builtins.set", "builtins.dict", "builtins.sorted", "builtins.reversed"}
_ZIPS = {"builtins.enumerate", "builtins.zip", "itertools.chain"}
_ELEMENT_METHODS = {"get", "pop", "setdefault", "popleft"}
_ROUNDS = 3  # callers found in one round give parameters values in the next
_MAX_DEPTH = 60
_MAX_VALUES = 40  # what may be so many things tells nothing
_NONE: frozenset[Value] = frozenset()


@dataclass(frozen=True)
class Instance:
    """An object of a class; `open`: or of a subclass."""

    made_of: ast.ClassDef
    open: bool = False


@dataclass(frozen=True)
class Compiled:
    """What `call`, of torch.compile, makes (a call or a bare decorator). `function` is what it compiles."""

    call: ast.expr
    module: Module
    function: ast.expr | Function | None


@dataclass(frozen=True)
class Private:
    """A copy of a function with a code object of its own (types.FunctionType)."""

    function: Function


Value = Function | ast.ClassDef | Instance | Compiled | Private


class Flow:
    """Built once for a program. Costs about as much as parsing it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[tuple[Module, ast.expr, bool], frozenset[Value]] = {}
        self._depth = 0
        self._sites: dict[Function | ast.ClassDef, list[Site]] = {}
        self._bases: dict[ast.ClassDef, list[ast.ClassDef]] = {}
        self._subclasses: dict[ast.ClassDef, list[ast.ClassDef]] = {}
        self._ancestors: dict[ast.ClassDef, list[ast.ClassDef]] = {}
        self._below: dict[ast.ClassDef, list[ast.ClassDef]] = {}
        self._methods: dict[ast.ClassDef, dict[str, list[Function]]] = {}
        for owner in program.classes:
            found = [each for base in owner.bases for each in self._classes_named(program.homes[owner], base)]
            self._bases[owner] = found
            methods = self._methods[owner] = {}
            for part in owner.body:
                if isinstance(part, _METHODS):
                    methods.setdefault(part.name, []).append(part)
            for base in found:
                if program.is_test(program.homes[base]) or not program.is_test(program.homes[owner]):
                    self._subclasses.setdefault(base, []).append(owner)
        self._fields = {owner: fields_of(owner) for owner in program.classes}
        self._returns: dict[Function, list[ast.expr]] = {
            function: [
                node.value for node in own_nodes(function) if isinstance(node, ast.Return) and node.value is not None
            ]
            for function in program.homes
            if isinstance(function, _METHODS)
        }
        calls = [
            (module, call)
            for module in program.files.values()
            for call in module.calls
            if not self._leaves(module, call)
        ]
        size = -1
        for _ in range(_ROUNDS):
            self._known.clear()
            self._sites = self._find_sites(calls)
            found_now = sum(map(len, self._sites.values()))
            if found_now == size:
                break
            size = found_now
        self._known.clear()

    # -- what an expression stands for

    def values(self, module: Module, node: ast.expr) -> frozenset[Value]:
        return self._values(module, node, elements=False)

    def elements(self, module: Module, node: ast.expr) -> frozenset[Value]:
        """What the container `node` holds."""
        return self._values(module, node, elements=True)

    def callees(self, module: Module, call: ast.Call) -> list[Function]:
        """The functions of the program that this call runs; a class runs its `__init__`."""
        return list(self.run_by(self.values(module, call.func)))

    def run_by(self, values: Iterable[Value]) -> Iterator[Function]:
        """The functions that run when one of `values` is called."""
        for value in values:
            if isinstance(value, ast.ClassDef):
                yield from self.methods(Instance(value), "__init__")
                yield from self.methods(Instance(value), "__post_init__")
            elif isinstance(value, Instance):
                yield from self.methods(value, "__call__") or self.methods(value, "forward")
            elif isinstance(value, Private):
                yield value.function
            elif isinstance(value, Compiled):
                inner = value.function
                if isinstance(inner, _METHODS):
                    yield inner
                elif isinstance(inner, ast.expr):
                    found = self.values(value.module, inner)
                    yield from self.run_by(each for each in found if not isinstance(each, Compiled))
            else:
                yield value

    def methods(self, value: Instance, name: str) -> list[Function]:
        owners = [next((each for each in self.ancestors(value.made_of) if name in self._methods[each]), None)]
        if value.open:
            owners += self.below(value.made_of)
        return [
            each for owner in dict.fromkeys(owners) if owner is not None for each in self._methods[owner].get(name, [])
        ]

    def ancestors(self, owner: ast.ClassDef) -> list[ast.ClassDef]:
        """The class and its bases, nearest first."""
        if owner in self._ancestors:
            return self._ancestors[owner]
        found: dict[ast.ClassDef, None] = {}
        waiting = [owner]
        while waiting:
            each = waiting.pop(0)
            if each not in found:
                found[each] = None
                waiting += self._bases.get(each, [])
        self._ancestors[owner] = list(found)
        return self._ancestors[owner]

    def below(self, owner: ast.ClassDef) -> list[ast.ClassDef]:
        """The subclasses, direct or not; none where they are too many to tell anything."""
        if owner in self._below:
            return self._below[owner]
        found: dict[ast.ClassDef, None] = {}
        waiting = list(self._subclasses.get(owner, []))
        while waiting:
            each = waiting.pop()
            if each not in found:
                found[each] = None
                waiting += self._subclasses.get(each, [])
        self._below[owner] = list(found) if len(found) <= _MAX_VALUES else []
        return self._below[owner]

    def is_property(self, function: Function) -> bool:
        home = self.program.homes[function]
        return isinstance(function, _METHODS) and any(
            home.name(each) in _PROPERTIES for each in function.decorator_list
        )

    def field_values(self, owner: ast.ClassDef, name: str) -> list[tuple[Module, ast.expr]]:
        """What the class assigns to `self.name`."""
        return list(self._field_exprs(owner, name))

    def sites(self, function: Function | ast.ClassDef) -> list[Site]:
        return self._sites.get(function, [])

    # -- how

    def _classes_named(self, home: Module, base: ast.expr) -> Iterator[ast.ClassDef]:
        if isinstance(base, ast.Subscript):  # Generic[T]
            base = base.value
        dotted = home.name(base)
        bindings = [each for _, each in self.program.find(home, dotted)] if dotted else []
        for each in [*home.definitions(base), *bindings]:
            if isinstance(each, ast.ClassDef):
                yield each

    def _values(self, module: Module, node: ast.expr, *, elements: bool) -> frozenset[Value]:
        key = (module, node, elements)
        known = self._known.get(key)
        if known is None:
            if self._depth >= _MAX_DEPTH:
                return _NONE
            self._known[key] = _NONE  # what a cycle finds
            self._depth += 1
            try:
                search = self._element_parts if elements else self._parts
                known = self._known[key] = _few(search(module, node))
            finally:
                self._depth -= 1
        return known

    def _parts(self, module: Module, node: ast.expr) -> Iterator[Value]:
        if isinstance(node, ast.Lambda):
            yield node
        elif isinstance(node, ast.Name):
            for home, binding in self._bindings(module, node):
                yield from self._bound(home, binding)
        elif isinstance(node, ast.Attribute):
            yield from self._attribute(module, node)
        elif isinstance(node, ast.Call):
            yield from self._call(module, node)
        elif isinstance(node, ast.Subscript):
            yield from self.elements(module, node.value)
        else:
            for each in _alternatives(node):
                yield from self.values(module, each)

    def _element_parts(self, module: Module, node: ast.expr) -> Iterator[Value]:
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)):
            for each in node.values if isinstance(node, ast.Dict) else node.elts:
                yield from self.values(module, each)
        elif isinstance(node, ast.DictComp):
            yield from self.values(module, node.value)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            yield from self.values(module, node.elt)
        elif isinstance(node, ast.Name):
            for home, binding in self._bindings(module, node):
                if isinstance(binding, ast.expr):
                    yield from self.elements(home, binding)
                elif isinstance(binding, Parameter):
                    for site, given in self._given(binding):
                        yield from self.elements(site.module, given)
        elif isinstance(node, ast.Attribute):
            for owner in self._owners(module, node.value):
                fields = self._fields[owner]
                for each in fields.elements.get(node.attr, []):
                    yield from self.values(self.program.homes[owner], each)
                for home, each in self._field_exprs(owner, node.attr):
                    yield from self.elements(home, each)
        elif isinstance(node, ast.Call):
            if module.name(node.func) in _COPIES and node.args:
                yield from self.elements(module, node.args[0])
            elif module.name(node.func) in _ZIPS:
                for each in node.args:
                    yield from self.elements(module, each)
            elif isinstance(node.func, ast.Attribute) and node.func.attr in {"values", "items", "copy"}:
                yield from self.elements(module, node.func.value)
            else:
                for function in self.callees(module, node):
                    for each in self._returns.get(function, []):
                        yield from self.elements(self.program.homes[function], each)
        else:
            for each in _alternatives(node):
                yield from self.elements(module, each)

    def _bindings(self, module: Module, node: ast.Name) -> Iterator[tuple[Module, Binding]]:
        for binding in module.scopes[node].lookup(node.id):
            if isinstance(binding, Imported):
                yield from self.program.find(module, binding.name)
            else:
                yield module, binding

    def _bound(self, home: Module, binding: Binding) -> Iterator[Value]:
        if isinstance(binding, _METHODS):
            compiled = [self.compiled_by_decorator(home, each, binding) for each in binding.decorator_list]
            found = [each for each in compiled if each is not None]
            yield from found
            if not found:
                yield binding
        elif isinstance(binding, (ast.Lambda, ast.ClassDef)):
            yield binding
        elif isinstance(binding, ast.expr):
            yield from self.values(home, binding)
        elif isinstance(binding, Element):
            yield from self.elements(home, binding.iterable)
        elif isinstance(binding, Parameter):
            yield from self._parameter(home, binding)

    def compiled_by_decorator(self, home: Module, decorator: ast.expr, function: Function) -> Compiled | None:
        """What `@torch.compile` makes of a function; None: it is another decorator."""
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        if home.name(call) == "torch.compile":
            return Compiled(decorator, home, function)
        if isinstance(decorator, ast.Call) and home.name(call) == "functools.partial" and decorator.args:
            return Compiled(decorator, home, function) if home.name(decorator.args[0]) == "torch.compile" else None
        return None

    def _attribute(self, module: Module, node: ast.Attribute) -> Iterator[Value]:
        dotted = module.name(node)
        if dotted is not None:
            for home, binding in self.program.find(module, dotted):
                yield from self._bound(home, binding)
        for value in self.values(module, node.value):
            if isinstance(value, Instance):
                for method in self.methods(value, node.attr):
                    home = self.program.homes[method]
                    if self.is_property(method):
                        for each in self._returns[method]:
                            yield from self.values(home, each)
                    else:
                        yield from self._bound(home, method)
            elif isinstance(value, ast.ClassDef):
                yield from self.methods(Instance(value), node.attr)
        for owner in self._owners(module, node.value):
            for home, each in self._field_exprs(owner, node.attr):
                yield from self.values(home, each)

    def _owners(self, module: Module, node: ast.expr) -> list[ast.ClassDef]:
        """The classes that may hold an attribute of `node`."""
        owners: dict[ast.ClassDef, None] = {}
        for value in self.values(module, node):
            if isinstance(value, Instance):
                owners.update(dict.fromkeys(self.ancestors(value.made_of)))
                owners.update(dict.fromkeys(self.below(value.made_of) if value.open else []))
            elif isinstance(value, ast.ClassDef):
                owners.update(dict.fromkeys(self.ancestors(value)))
        return list(owners)

    def _field_exprs(self, owner: ast.ClassDef, name: str) -> Iterator[tuple[Module, ast.expr]]:
        home = self.program.homes[owner]
        for each in self._fields[owner].values.get(name, []):
            yield home, each
        declared = [
            each.target.id
            for each in owner.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        if name in declared and not self.methods(Instance(owner), "__init__"):
            for site in self.sites(owner):
                position = declared.index(name)
                if name in site.keywords:
                    yield site.module, site.keywords[name]
                elif position < len(site.positional) and not _starred(site.positional[: position + 1]):
                    yield site.module, site.positional[position]

    def _call(self, module: Module, call: ast.Call) -> Iterator[Value]:
        name = module.name(call.func)
        if name == "torch.compile":
            yield Compiled(call, module, call.args[0] if call.args else module.keywords(call).get("model"))
            return
        if name == "functools.partial":
            if call.args:
                yield from self.values(module, call.args[0])
            return
        if name == "typing.cast":
            for each in call.args[1:2]:
                yield from self.values(module, each)
            return
        if name == "types.FunctionType":
            yield from self._private(module, call)
            return
        if name == "builtins.super":
            owner = module.class_around(call)
            yield from (Instance(base) for base in (self._bases.get(owner, []) if owner else []))
            return
        if isinstance(call.func, ast.Attribute) and call.func.attr in _ELEMENT_METHODS:
            yield from self.elements(module, call.func.value)
        for value in self.values(module, call.func):
            if isinstance(value, ast.ClassDef):
                yield Instance(value)
        for function in self.callees(module, call):
            home = self.program.homes[function]
            if isinstance(function, ast.Lambda):
                yield from self.values(home, function.body)
            elif function.name not in {"__init__", "__post_init__"}:
                for each in self._returns[function]:
                    yield from self.values(home, each)

    def _private(self, module: Module, call: ast.Call) -> Iterator[Value]:
        for argument in call.args[:1]:
            for node in ast.walk(module.value(argument)):
                if isinstance(node, ast.Attribute) and node.attr == "__code__":
                    yield from (Private(each) for each in self.run_by(self.values(module, node.value)))

    def _parameter(self, home: Module, parameter: Parameter) -> Iterator[Value]:
        function, arguments = parameter.function, parameter.function.args
        owner = home.method_owner(function)
        first = [*arguments.posonlyargs, *arguments.args][:1]
        if owner is not None and first and first[0].arg == parameter.name and not self._static(home, function):
            yield Instance(owner, open=True)
            return
        found = False
        for site, given in self._given(parameter):
            for value in self.values(site.module, given):
                found = True
                yield value
        if not found:
            yield from self._annotated(home, parameter)

    def _given(self, parameter: Parameter) -> Iterator[tuple[Site, ast.expr]]:
        """What the known callers give."""
        function, name = parameter.function, parameter.name
        home = self.program.homes[function]
        names = [each.arg for each in [*function.args.posonlyargs, *function.args.args]]
        if home.method_owner(function) is not None and not self._static(home, function):
            names = names[1:]
        for site in self.sites(function):
            if name in site.keywords:
                yield site, site.keywords[name]
            elif name in names:
                position = names.index(name)
                if position < len(site.positional) and not _starred(site.positional[: position + 1]):
                    yield site, site.positional[position]

    def _annotated(self, home: Module, parameter: Parameter) -> Iterator[Value]:
        arguments = parameter.function.args
        for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            if each.arg == parameter.name and each.annotation is not None:
                for part in _annotation_parts(each.annotation):
                    for value in self.values(home, part):
                        if isinstance(value, ast.ClassDef):
                            yield Instance(value, open=True)

    def _static(self, home: Module, function: Function) -> bool:
        return isinstance(function, _METHODS) and any(
            home.name(each) == "builtins.staticmethod" for each in function.decorator_list
        )

    def _leaves(self, module: Module, call: ast.Call) -> bool:
        """Whether it calls another library, and hands no function over."""
        dotted = module.name(call.func)
        return dotted is not None and not self.program.find(module, dotted) and not any(handed_over(module, call))

    def _find_sites(self, calls: list[tuple[Module, ast.Call]]) -> dict[Function | ast.ClassDef, list[Site]]:
        sites: dict[Function | ast.ClassDef, list[Site]] = {}
        for module, call in calls:
            test = self.program.is_test(module)
            for callee, site in self._site(module, call):
                if not test or self.program.is_test(self.program.homes[callee]):
                    sites.setdefault(callee, []).append(site)
        return sites

    def _site(self, module: Module, call: ast.Call) -> Iterator[tuple[Function | ast.ClassDef, Site]]:
        values = self.values(module, call.func)
        site = Site(module, tuple(call.args), module.keywords(call)) if values else None
        if site is not None:
            for value in values:
                if isinstance(value, ast.ClassDef):
                    yield value, site
            for function in self.run_by(values):
                yield function, site
        for target, handed in handed_over(module, call):
            for function in self.run_by(self.values(module, target)):
                yield function, handed


def _few(values: Iterator[Value]) -> frozenset[Value]:
    found: set[Value] = set()
    for each in values:
        found.add(each)
        if len(found) > _MAX_VALUES:
            return _NONE
    return frozenset(found)


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """The expressions one of which `node` is."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, (ast.NamedExpr, ast.Await, ast.Starred)):
        return [node.value]
    return []


def _annotation_parts(node: ast.expr) -> list[ast.expr]:
    """`A | None`, `Optional[A]`: the names in it."""
    if isinstance(node, ast.BinOp):
        return [*_annotation_parts(node.left), *_annotation_parts(node.right)]
    if isinstance(node, ast.Subscript) and isinstance(node.value, (ast.Name, ast.Attribute)):
        name = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
        return _annotation_parts(node.slice) if name in {"Optional", "Annotated"} else []
    return [node] if isinstance(node, (ast.Name, ast.Attribute)) else []


def _starred(given: Iterable[ast.expr]) -> bool:
    return any(isinstance(each, ast.Starred) for each in given)
