"""Thread-safe torch.compile for one model replica a thread: strategies, private code objects, the warm-up gate.

torch.compile is not thread safe, and CUDA graphs are captured one at a time in a process. What holds (measured with
12 threads on one GPU and 3 on each of 4): every worker compiles a code object of its own (`private_function`), with
options spelled per compile (`STRATEGIES`), and everything from building the model to the last capture runs under one
process-wide lock (`Gate.exclusive`); then all pass a barrier (`Gate.pass_through`), and only then does any work run.
`counters` shows whether it really went that way.
"""

from trainer.compile.build import compiled_step
from trainer.compile.counters import CompileEvent, CompileLog, GraphCounts, graph_counts
from trainer.compile.definition import CompiledStep, Loss, Optimizer, Prepared, StepDefinition
from trainer.compile.gate import Gate, gate_holder, steady_phase
from trainer.compile.private import private_function
from trainer.compile.strategies import STRATEGIES, Strategy
from trainer.compile.warmup import untouched

__all__ = [
    "STRATEGIES",
    "CompileEvent",
    "CompileLog",
    "CompiledStep",
    "Gate",
    "GraphCounts",
    "Loss",
    "Optimizer",
    "Prepared",
    "StepDefinition",
    "Strategy",
    "compiled_step",
    "gate_holder",
    "graph_counts",
    "private_function",
    "steady_phase",
    "untouched",
]
