"""A small trainer in threads that every rule is content with, and patches that break it one way each."""

from __future__ import annotations

FILES = {
    "small/__init__.py": "",
    "small/gate.py": """\
import contextlib
import threading

_LOCK = threading.Lock()


class Gate:
    def __init__(self, parties):
        self._barrier = threading.Barrier(parties)

    @contextlib.contextmanager
    def exclusive(self):
        with _LOCK:
            yield

    def pass_through(self):
        self._barrier.wait()
""",
    "small/step.py": """\
import types

import torch

OPTIONS = {
    **torch._inductor.list_mode_options("reduce-overhead"),
    "triton.cudagraph_trees": False,
}


def private(function, name):
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, None, function.__closure__)


class Step:
    def __init__(self, model, device, seed):
        def forward(x):
            return model(x).square().mean()

        self._model = model
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self._forward = torch.compile(private(forward, f"forward_{seed}"), options=OPTIONS)

    def __call__(self, x):
        noise = torch.rand(x.shape, generator=self._generator, device=self._device)
        loss = self._forward(x + noise)
        loss.backward()
        self._optimizer.step()
        return loss.detach().clone()

    def warm_up(self, x):
        for _ in range(3):
            self(x)
""",
    "small/worker.py": """\
import threading

import torch


class Worker(threading.Thread):
    def __init__(self, index, device, build, gate, rows):
        super().__init__(name=f"worker-{index}")
        self._index = index
        self._device = device
        self._build = build
        self._gate = gate
        self._rows = rows
        self.losses = []

    def run(self):
        torch.cuda.set_device(self._device)
        with self._gate.exclusive():
            step = self._build(self._index, self._device)
        self._gate.pass_through()
        for x in self._rows:
            self.losses.append(step(x))
        torch.cuda.current_stream(self._device).synchronize()
""",
    "small/main.py": """\
import torch

from .gate import Gate
from .step import Step
from .worker import Worker


def build(index, device):
    model = torch.nn.Linear(8, 8, device="meta").to_empty(device=device)
    step = Step(model, device, index)
    step.warm_up(torch.zeros(4, 8, device=device))
    return step


def main(devices, rows):
    gate = Gate(len(devices))
    workers = [Worker(index, device, build, gate, rows) for index, device in enumerate(devices)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
""",
}

_IN_RUN = "        self._gate.pass_through()\n"
_IN_CALL = "        loss.backward()\n"
_IN_MAIN = "    gate = Gate(len(devices))\n"

# rule -> file, text, what it becomes: each is stopped by (errors), or known to (warnings), this rule alone
ERRORS = {
    "compile-mode-and-options": ("small/step.py", "options=OPTIONS)", 'mode="reduce-overhead", options=OPTIONS)'),
    "private-tls-stash": (
        "small/worker.py", _IN_RUN, f'{_IN_RUN}        torch._C._stash_obj_in_tls("tree_manager_locks", {{}})\n',
    ),
    "trees-config-outside-worker": (
        "small/main.py", _IN_MAIN, f"{_IN_MAIN}    torch._inductor.config.triton.cudagraph_trees = False\n",
    ),
    "compile-outside-gate": (
        "small/worker.py",
        "        with self._gate.exclusive():\n            step = self._build(",
        "        step = self._build(",
    ),
    "worker-without-device": ("small/worker.py", "        torch.cuda.set_device(self._device)\n", ""),
    "default-generator-draw": ("small/step.py", "generator=self._generator, ", ""),
    "global-seed-in-worker": ("small/worker.py", _IN_RUN, f"{_IN_RUN}        torch.manual_seed(self._index)\n"),
    "device-synchronize-in-worker": (
        "small/worker.py",
        "        torch.cuda.current_stream(self._device).synchronize()\n",
        "        for device in range(torch.cuda.device_count()):\n            torch.cuda.synchronize(device)\n",
    ),
    "mark-step-in-thread": (
        "small/step.py", _IN_CALL, f"        torch.compiler.cudagraph_mark_step_begin()\n{_IN_CALL}",
    ),
    "global-reset-in-worker": ("small/worker.py", _IN_RUN, f"{_IN_RUN}        torch.compiler.reset()\n"),
    "silent-eager": (
        "small/main.py", _IN_MAIN, f"{_IN_MAIN}    torch._dynamo.config.error_on_nested_fx_trace = False\n",
    ),
    "size-asserts-off": (
        "small/step.py", '    "triton.cudagraph_trees"', '    "size_asserts": False,\n    "triton.cudagraph_trees"',
    ),
    "output-kept-across-steps": ("small/step.py", "loss.detach().clone()", "loss.detach()"),
    "compiled-optimizer-step": (
        "small/step.py",
        "        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n",
        "        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
        "        self._update = torch.compile(self._optimizer.step, options=OPTIONS)\n",
    ),
    "weights-moved-after-capture": (
        "small/step.py",
        "    def warm_up(",
        "    def reload(self, weights):\n        self._model.load_state_dict(weights, assign=True)\n\n    def warm_up(",
    ),
    "config-outside-worker": (
        "small/main.py", _IN_MAIN, f"{_IN_MAIN}    torch._dynamo.config.recompile_limit = 64\n",
    ),
    "global-capture-mode": (
        "small/step.py",
        "            self(x)\n",
        "            self(x)\n        with torch.cuda.graph(torch.cuda.CUDAGraph()):\n            self(x)\n",
    ),
}  # fmt: skip
WARNINGS = {
    "shared-code-object": ("small/step.py", 'private(forward, f"forward_{seed}")', "forward"),
}  # fmt: skip
