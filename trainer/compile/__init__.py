"""Thread-safe compiled training steps, one model replica a thread: docs/compile.md.

torch.compile is not thread safe, and CUDA graphs are captured one at a time in a process. What holds (measured with
12 threads on one GPU and 3 on each of 4): every worker compiles a code object of its own (`private_function`), with
options spelled per compile (`STRATEGIES`), and everything from building the model to the last capture runs under one
process-wide lock (`Gate.exclusive`); then all pass a barrier (`Gate.pass_through`), and only then does any work run.
`compiled_step` does a worker's part of that; `counters` shows whether it really went that way.
"""

from trainer.compile.buckets import UnknownInputsError
from trainer.compile.build import compiled_step
from trainer.compile.counters import CompileEvent, CompileLog, GraphCounts, graph_counts
from trainer.compile.definition import CompiledStep, Loss, Optimizer, Prepared, StepDefinition
from trainer.compile.failure import CaptureError
from trainer.compile.gate import Gate, GateShutError, gate_holder, steady_phase
from trainer.compile.generators import Draw, DrawLog, generators_put_back
from trainer.compile.pinned import MovedError
from trainer.compile.plan import StepPlan
from trainer.compile.private import private_function
from trainer.compile.strategies import STRATEGIES, available_strategies
from trainer.compile.strategy import Strategy
from trainer.compile.thread import own_device

__all__ = [
    "STRATEGIES",
    "CaptureError",
    "CompileEvent",
    "CompileLog",
    "CompiledStep",
    "Draw",
    "DrawLog",
    "Gate",
    "GateShutError",
    "GraphCounts",
    "Loss",
    "MovedError",
    "Optimizer",
    "Prepared",
    "StepDefinition",
    "StepPlan",
    "Strategy",
    "UnknownInputsError",
    "available_strategies",
    "compiled_step",
    "gate_holder",
    "generators_put_back",
    "graph_counts",
    "own_device",
    "private_function",
    "steady_phase",
]
