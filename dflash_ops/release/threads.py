"""What a program runs in threads that it starts, and whether inside a gate.

A worker function is a thread's target, the `run` of a Thread class, what a thread pool is given, and every function of
the program that one of these refers to. Only what the files show is followed, so the answer leans towards "no worker".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dflash_ops.release.flow import Compiled, Flow, Instance
from dflash_ops.release.gates import Gates
from dflash_ops.release.program import Program
from dflash_ops.release.resolve import Module
from dflash_ops.release.scopes import Function, own_nodes
from dflash_ops.release.workers import thread_targets

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SETS_DEVICE = {"torch.cuda.set_device", "torch.cuda.device", "torch.accelerator.set_device_index"}


@dataclass(frozen=True)
class Place:
    """A node that a worker evaluates. `gated`: always inside a gate. `warmed`: not, but workers run the same function
    inside a gate as well, so what it makes once is made there."""

    module: Module
    function: Function
    node: ast.AST
    gated: bool
    warmed: bool


class Threads:
    """Of one program. Empty where it starts no thread."""

    def __init__(self, program: Program) -> None:
        self._program = program

    @cached_property
    def flow(self) -> Flow:
        return Flow(self._program)

    def places(self, module: Module) -> list[Place]:
        """What workers evaluate of `module`."""
        return self._places.get(module, [])

    def home(self, function: Function) -> Module:
        """The file that defines a function."""
        return self._program.homes[function]

    @property
    def functions(self) -> frozenset[Function]:
        """Every function that a worker runs."""
        return frozenset(self._reached)

    @cached_property
    def worker_nodes(self) -> frozenset[ast.AST]:
        return frozenset(place.node for places in self._places.values() for place in places)

    @cached_property
    def spell_graphs(self) -> bool:
        """Whether any file spells CUDA graphs: a mode, an option, a capture."""
        return any(
            (isinstance(node, ast.Constant) and node.value in _GRAPH_WORDS)
            or (isinstance(node, ast.Attribute) and node.attr == "CUDAGraph")
            for module in self._program.files.values()
            for node in module.nodes
        )

    @cached_property
    def train(self) -> bool:
        """Whether a worker runs a backward, compiles, or calls compiled code."""
        return self.compile or any(
            isinstance(place.node, ast.Call)
            and (
                (isinstance(place.node.func, ast.Attribute) and place.node.func.attr == "backward")
                or place.module.name(place.node.func) == "torch.autograd.backward"
            )
            for places in self._places.values()
            for place in places
        )

    @cached_property
    def compile(self) -> bool:
        """Whether a worker compiles, captures, or calls compiled code."""
        return any(self._compiles(place) for places in self._places.values() for place in places)

    @cached_property
    def warm(self) -> frozenset[Compiled]:
        """What is called inside a gate, or in a thread that is no worker: before workers call it, it is compiled."""
        cold = {
            place.node for places in self._places.values() for place in places if not place.gated and not place.warmed
        }
        return frozenset(
            value
            for module in self._program.files.values()
            for call in module.calls
            if call not in cold
            for value in self.flow.values(module, call.func)
            if isinstance(value, Compiled)
        )

    def without_device(self, function: Function) -> bool:
        """Whether a thread that makes no device its current one runs `function`."""
        return any(not self._owns_device(root) for root in self._reached_from.get(function, ()))

    def given_device(self, function: Function) -> bool:
        """Whether such a thread works on a device that it was given."""
        return any(
            root in self._given_devices and not self._owns_device(root) for root in self._reached_from.get(function, ())
        )

    @cached_property
    def roots(self) -> list[Function]:
        if not any(_mentions_threads(module) for module in self._program.files.values()):
            return []
        found: dict[Function, None] = {}
        for owner in self.thread_classes:
            found.update(dict.fromkeys(self.flow.methods(Instance(owner), "run")))
        for module in self._program.files.values():
            for call in module.calls:
                for target in self._targets(module, call):
                    found.update(dict.fromkeys(self.flow.run_by(self.flow.values(module, target))))
        return list(found)

    @cached_property
    def thread_classes(self) -> frozenset[ast.ClassDef]:
        direct = [
            owner
            for owner in self._program.classes
            if any(self._program.homes[owner].name(base) in _THREADS for base in owner.bases)
        ]
        return frozenset(each for owner in direct for each in [owner, *self.flow.below(owner)])

    def _targets(self, module: Module, call: ast.Call) -> list[ast.expr]:
        return thread_targets(
            module,
            call,
            makes_thread=lambda made: not self.thread_classes.isdisjoint(self.flow.values(module, made)),
            is_thread=self.thread_classes.__contains__,
        )

    # -- what is reached

    @cached_property
    def _everything(self) -> frozenset[Function]:
        found: set[Function] = set()
        waiting = list(self.roots)
        while waiting:
            function = waiting.pop()
            if function not in found:
                found.add(function)
                home = self._program.homes[function]
                for node in own_nodes(function):
                    waiting += self._edges(home, node)
        return frozenset(found)

    @cached_property
    def _reached(self) -> dict[Function, set[bool]]:
        """Worker functions, with how they are run: inside a gate (True), outside (False)."""
        reached: dict[Function, set[bool]] = {}
        waiting = [(root, False) for root in self.roots]
        while waiting:
            function, gated = waiting.pop()
            ways = reached.setdefault(function, set())
            if gated in ways:
                continue
            ways.add(gated)
            waiting += [(each, gated or inside) for each, inside in self._calls_of(function)]
        return reached

    @cached_property
    def _gates(self) -> Gates:
        return Gates(self.flow, self._everything, self.thread_classes)

    @cached_property
    def _called(self) -> dict[Function, list[tuple[Function, bool]]]:
        return {}

    def _calls_of(self, function: Function) -> list[tuple[Function, bool]]:
        if function not in self._called:
            home = self._program.homes[function]
            self._called[function] = [
                (each, gated) for node, gated in self._gates.nodes(home, function) for each in self._edges(home, node)
            ]
        return self._called[function]

    @cached_property
    def _reached_from(self) -> dict[Function, list[Function]]:
        found: dict[Function, list[Function]] = {}
        for root in self.roots:
            seen = {root}
            waiting = [root]
            while waiting:
                function = waiting.pop()
                found.setdefault(function, []).append(root)
                for each, _ in self._calls_of(function):
                    if each not in seen:
                        seen.add(each)
                        waiting.append(each)
        return found

    @cached_property
    def _places(self) -> dict[Module, list[Place]]:
        found: dict[Module, list[Place]] = {}
        for function, ways in self._reached.items():
            home = self._program.homes[function]
            found.setdefault(home, []).extend(
                Place(home, function, node, gated or ways == {True}, not gated and True in ways)
                for node, gated in self._gates.nodes(home, function)
            )
        return found

    def _edges(self, home: Module, node: ast.AST) -> Iterator[Function]:
        """The functions that evaluating `node` runs, or hands on to be run."""
        flow = self.flow
        if isinstance(node, ast.Call):
            callees = flow.callees(home, node)
            yield from callees
            if not callees and not flow.values(home, node.func) and not self._elsewhere(home, node):
                # code that the program does not show may call what it is given
                for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                    yield from flow.run_by(flow.values(home, argument))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            for value in flow.values(home, node.value):
                if isinstance(value, Instance):
                    yield from (each for each in flow.methods(value, node.attr) if flow.is_property(each))
        elif isinstance(node, ast.withitem):
            for value in flow.values(home, node.context_expr):
                if isinstance(value, Instance):
                    yield from flow.methods(value, "__enter__")
                    yield from flow.methods(value, "__exit__")

    def _elsewhere(self, home: Module, call: ast.Call) -> bool:
        """Whether what the call gets runs in another thread or process, or later, or only makes a partial of it."""
        name = home.name(call.func) or ""
        called = call.func.attr if isinstance(call.func, ast.Attribute) else name
        return name.startswith(_ELSEWHERE) or called.endswith(("Process", "Thread")) or bool(self._targets(home, call))

    def _compiles(self, place: Place) -> bool:
        node = place.node
        if not isinstance(node, ast.Call):
            return False
        if place.module.name(node.func) in _MAKERS:
            return True
        return any(isinstance(value, Compiled) for value in self.flow.values(place.module, node.func))

    def _owns_device(self, root: Function) -> bool:
        return root in self._device_owners

    @cached_property
    def _device_owners(self) -> frozenset[Function]:
        return frozenset(
            root
            for places in self._places.values()
            for place in places
            if isinstance(place.node, ast.Call) and place.module.name(place.node.func) in _SETS_DEVICE
            for root in self._reached_from[place.function]
        )

    @cached_property
    def _given_devices(self) -> frozenset[Function]:
        return frozenset(
            root
            for places in self._places.values()
            for place in places
            if isinstance(place.node, ast.Call) and _gives_device(place.module, place.node)
            for root in self._reached_from[place.function]
        )


def _gives_device(module: Module, call: ast.Call) -> bool:
    """`device=device`, `.to(self.device)`: a device that is not spelled here."""
    given = module.keywords(call).get("device")
    if given is None and isinstance(call.func, ast.Attribute) and call.func.attr in {"to", "cuda"} and call.args:
        given = call.args[0]
    name = given.attr if isinstance(given, ast.Attribute) else given.id if isinstance(given, ast.Name) else ""
    return "device" in name or "gpu" in name


_THREADS = {"threading.Thread", "threading.Timer"}
_ELSEWHERE = (
    "functools.partial",
    "signal.",
    "atexit.",
    "multiprocessing.",
    "torch.multiprocessing.",
    "weakref.",
)
_MAKERS = {
    "torch.compile",
    "torch.cuda.graph",
    "torch.cuda.graphs.graph",
    "torch.cuda.make_graphed_callables",
    "torch.cuda.graphs.make_graphed_callables",
}
_GRAPH_WORDS = ("reduce-overhead", "max-autotune", "triton.cudagraphs")
_HINTS = ("threading", "_thread", "submit", "run_in_executor", "to_thread", "ThreadPool")


def _mentions_threads(module: Module) -> bool:
    """Whether it can start one: cheaper than to look."""
    return any(hint in name for name in module.words for hint in _HINTS)
