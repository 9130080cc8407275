"""Where a file sets values of torch's compiler configuration, and environment variables."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_ops.release.resolve import Module, text

INDUCTOR, DYNAMO = "torch._inductor.config", "torch._dynamo.config"
_CONFIGS = (INDUCTOR, DYNAMO)


@dataclass(frozen=True)
class ConfigSet:
    """`key` of `config` gets `value` (None: not a value that the file shows) at `node`."""

    node: ast.expr
    config: str
    key: str
    value: ast.expr | None


def config_sets(module: Module) -> Iterator[ConfigSet]:
    """Assignments, `setattr`, `patch` (call, `with`, decorator) and `load_config`, in the file's order."""
    if not _knows_compiler(module):
        return
    assigned = {target: node.value for node in module.nodes if isinstance(node, ast.Assign) for target in node.targets}
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield from _split(module.name(node), node, assigned.get(node))
        elif isinstance(node, ast.Call):
            yield from _call(module, node)


def _knows_compiler(module: Module) -> bool:
    return any("_inductor" in word or "_dynamo" in word for word in module.words)


def _split(name: str | None, node: ast.expr, value: ast.expr | None) -> Iterator[ConfigSet]:
    for config in _CONFIGS:
        if name is not None and name.startswith(f"{config}."):
            yield ConfigSet(node, config, name[len(config) + 1 :], value)


def _call(module: Module, call: ast.Call) -> Iterator[ConfigSet]:
    function = module.name(call.func)
    if function == "builtins.setattr" and len(call.args) >= 2:
        value = call.args[2] if len(call.args) > 2 else None
        yield from _split(f"{module.name(call.args[0])}.{text(call.args[1])}", call, value)
        return
    for config in _CONFIGS:
        if function not in {f"{config}.patch", f"{config}.load_config"}:
            continue
        given = dict(module.keywords(call))
        for argument in call.args[:1]:
            shown = module.value(argument)
            given.update(module.items(shown))
            key = text(shown)
            if key is not None:
                given[key] = call.args[1] if len(call.args) > 1 else call
        for key, value in given.items():
            yield ConfigSet(call, config, key, value)


def environment_sets(module: Module) -> Iterator[tuple[ast.expr, str, ast.expr]]:
    """The node, the name and the value of every environment variable that the file sets for its own process."""
    for node in module.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and module.name(target.value) == "os.environ":
                    name = text(module.value(target.slice))
                    if name is not None:
                        yield target, name, node.value
        elif isinstance(node, ast.Call):
            function = module.name(node.func)
            if function in {"os.environ.setdefault", "os.putenv", "os.environ.__setitem__"} and len(node.args) == 2:
                name = text(module.value(node.args[0]))
                if name is not None:
                    yield node, name, node.args[1]
            elif function == "os.environ.update":
                given = dict(module.keywords(node))
                for argument in node.args[:1]:
                    given.update(module.items(argument))
                for name, value in given.items():
                    yield node, name, value


def is_literal(module: Module, node: ast.expr | None, value: object) -> bool:
    shown = module.value(node) if node is not None else None
    return isinstance(shown, ast.Constant) and shown.value is value
