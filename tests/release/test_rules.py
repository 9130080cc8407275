"""The compile-safety rules: what each finds, and what it leaves alone."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

import pytest

from dflash_ops.release import Finding, check
from dflash_ops.release.rules import RULES
from tests.release import threaded
from tests.release.trees import write

ROOT = Path(__file__).parents[2]


def findings(tmp_path: Path, source: str) -> list[Finding]:
    return check(write(tmp_path, {"x.py": textwrap.dedent(source)}), python=None)


def hits(tmp_path: Path, source: str, rule: str) -> list[int]:
    found = findings(tmp_path, source)
    assert {finding.rule for finding in found} <= {rule}
    assert all(finding.fix and finding.why and finding.why.count("\n") <= 1 for finding in found)
    return [finding.line for finding in found]


MODE_AND_OPTIONS = [
    'import torch\ntorch.compile(f, mode="reduce-overhead", options={"a": 1})',
    'import torch as t\nt.compile(f, mode="default", options={})',
    'from torch import compile as c\nc(f, options={"a": 1}, mode="default")',
    'import torch\n@torch.compile(mode="default", options={"a": 1})\ndef f(x): return x',
    'import torch, functools\nc = functools.partial(torch.compile, mode="default", options={"a": 1})',
    'import torch; from functools import partial as p\np(torch.compile, f, mode="default", options={"a": 1})',
    'import torch, functools\nc = functools.partial(torch.compile, mode="default"); c(f, options={"a": 1})',
    'import torch\ncompile = torch.compile; compile(f, mode="default", options={"a": 1})',
    'import torch\ngetattr(torch, "compile")(f, mode="default", options={"a": 1})',
    'import torch\nkw = {"mode": "default", "options": {"a": 1}}; torch.compile(f, **kw)',
    'import torch\ntorch.compile(f, mode="default", **dict(options={"a": 1}))',
    'import importlib\nimportlib.import_module("torch").compile(f, mode="default", options={"a": 1})',
    'try: import torch\nexcept ImportError: torch = None; torch.compile(f, mode="m", options={})',
    'import torch\ndef g(options=None): return torch.compile(f, mode="default", options=options)',
]


@pytest.mark.parametrize("source", MODE_AND_OPTIONS)
def test_mode_and_options(tmp_path: Path, source: str) -> None:
    assert hits(tmp_path, source, "compile-mode-and-options") == [2]


@pytest.mark.parametrize(
    "source",
    [
        'import torch\ntorch.compile(f, mode="default")',
        'import torch\ntorch.compile(f, options={"a": 1})',
        'import torch\ntorch.compile(f, mode=None, options={"a": 1})',
        'import torch\nMODE = None\ntorch.compile(f, mode=MODE, options={"a": 1})',
        'import torch\ntorch.compile(f, mode="default", options=None)',
        'import re\nre.compile("x", mode="default", options={})',
        'model.compile(mode="default", options={})',
        'import torch\ndef g(torch): torch.compile(f, mode="m", options={})',
        'import torch\ndef compile(f, mode, options): pass\ncompile(f, mode="m", options={})',
        '"""torch.compile(f, mode=\'default\', options={})"""\n# torch.compile(f, mode="m", options={})',
        'import torch\nclass A:\n  compile = torch.compile\n  def f(self): compile(f, mode="m", options={})',
        'from .torch import compile\ncompile(f, mode="m", options={})',
        'import torch, functools\nfunctools.partial(torch.load, mode="m", options={})',
    ],
)
def test_mode_and_options_leaves_alone(tmp_path: Path, source: str) -> None:
    assert findings(tmp_path, source) == []


def test_mode_and_options_from_variables_is_a_warning(tmp_path: Path) -> None:
    source = "import torch\ndef g(mode, options): return torch.compile(f, mode=mode, options=options)"
    (finding,) = findings(tmp_path, source)
    assert (finding.severity.value, finding.blocks) == ("warning", False)


PRIVATE_STASH = [
    'import torch\ntorch._C._stash_obj_in_tls("tree_manager_locks", x)',
    'import torch as t\nif t._C._is_key_in_tls("k"): pass',
    'from torch._C import _get_obj_in_tls as get\nget("k")',
    'from torch import _C\n_C._stash_obj_in_tls("k", x)',
    'import torch\nstash = torch._C._stash_obj_in_tls; stash("k", x)',
    'import torch\ngetattr(torch._C, "_stash_obj_in_tls")("k", x)',
    "import torch._inductor.cudagraph_trees\ntorch._inductor.cudagraph_trees.local.tree_manager_containers = {}",
    "from torch._inductor import cudagraph_trees as trees\ntrees.local.tree_manager_locks = {}",
    "from torch._inductor.cudagraph_trees import local\nlocal.tree_manager_containers = {}",
    'import torch._inductor.cudagraph_trees as trees\nsetattr(trees.local, "tree_manager_locks", {})',
    "from torch._inductor import cudagraph_trees\nl = cudagraph_trees.local; l.tree_manager_locks = {}",
    "from torch._inductor import cudagraph_trees\ncudagraph_trees.local = make()",
    "from torch._inductor import cudagraph_trees\ncudagraph_trees.local.tree_manager_locks[0] = lock",
    "from torch._inductor import cudagraph_trees\ncudagraph_trees.local.__dict__.update(state)",
    'import sys\nsys.modules["torch._inductor.cudagraph_trees"].local.tree_manager_locks = {}',
    "from torch._inductor import cudagraph_trees\nx, cudagraph_trees.local.tree_manager_locks = 1, {}",
]


@pytest.mark.parametrize("source", PRIVATE_STASH)
def test_private_stash(tmp_path: Path, source: str) -> None:
    assert hits(tmp_path, source, "private-tls-stash") == [2]


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nlocal = threading.local()\nlocal.tree_manager_locks = {}",
        "from torch._inductor import cudagraph_trees\nlocks = cudagraph_trees.local.tree_manager_locks",
        'import torch\nok = hasattr(torch._C, "_stash_obj_in_tls")',
        '_stash_obj_in_tls("k", x)\nself._C._is_key_in_tls("k")',
        "from torch._inductor.cudagraph_trees import local\nlocal = {}\nlocal.x = 1",
        'NAME = "torch._C._stash_obj_in_tls"',
    ],
)
def test_private_stash_leaves_alone(tmp_path: Path, source: str) -> None:
    assert findings(tmp_path, source) == []


OUTSIDE_WORKER = [
    "import torch\ntorch._inductor.config.triton.cudagraph_trees = False",
    "import torch._inductor.config as ic\nic.triton.cudagraph_trees = False",
    "from torch._inductor import config\nconfig.triton.cudagraph_trees = True",
    "from torch._inductor.config import triton as t\nt.cudagraph_trees = False",
    'from torch._inductor import config\nsetattr(config.triton, "cudagraph_trees", False)',
    'from torch._inductor import config\nsetattr(config, "triton.cudagraph_trees", False)',
    'from torch._inductor import config\nwith config.patch({"triton.cudagraph_trees": False}): f()',
    'from torch._inductor import config\nwith config.patch("triton.cudagraph_trees", False): f()',
    'from torch._inductor import config\nconfig.patch(**{"triton.cudagraph_trees": False}).__enter__()',
    'from torch._inductor import config\nOFF = {"triton.cudagraph_trees": False}; config.patch(OFF)',
    'from torch._inductor import config\nconfig.load_config({"triton.cudagraph_trees": False})',
    "from torch._inductor import config\ndef setup(): config.triton.cudagraph_trees = False\nsetup()",
    "from torch._inductor import config\nclass A: config.triton.cudagraph_trees = False",
    "from torch._inductor import config\ndef main(): c = config; c.triton.cudagraph_trees = False",
    'from torch._inductor import config\n@config.patch("triton.cudagraph_trees", False)\ndef main(): pass',
    "def f():\n  global ic; import torch._inductor.config as ic; ic.triton.cudagraph_trees = False",
]


@pytest.mark.parametrize("source", OUTSIDE_WORKER)
def test_trees_config_outside_a_worker(tmp_path: Path, source: str) -> None:
    assert hits(tmp_path, source, "trees-config-outside-worker") == [2]


def test_a_main_function_is_found_beside_a_worker(tmp_path: Path) -> None:
    source = """\
        import threading
        from torch._inductor import config

        def work():
            step()

        def step():
            pass

        def main():
            config.triton.cudagraph_trees = False
            threading.Thread(target=work).start()
        """
    assert hits(tmp_path, source, "trees-config-outside-worker") == [11]


SET = "config.triton.cudagraph_trees = False"
HEAD = "import threading\nfrom threading import Thread\nfrom torch._inductor import config\n"


@pytest.mark.parametrize(
    "source",
    [
        f"def work(): {SET}\nthreading.Thread(target=work).start()",
        f"def work(): {SET}\nThread(None, work).start()",
        f"def configure(): {SET}\ndef work(): configure()\nThread(target=work)",
        f"class W(threading.Thread):\n  def run(self): {SET}",
        f"class Base(Thread): pass\nclass W(Base):\n  def run(self): self.setup()\n  def setup(self): {SET}",
        f"class W:\n  def go(self): Thread(target=self._work).start()\n  def _work(self): {SET}",
        f"class W(Thread):\n  def __init__(self): super().__init__(target=self._work)\n  def _work(self): {SET}",
        f"def work(n): {SET}\nimport functools\nThread(target=functools.partial(work, 1))",
        f"def work(n): {SET}\nThread(target=lambda: work(1))",
        f"def main():\n  def work(): {SET}\n  Thread(target=work).start()",
        f"from concurrent.futures import ThreadPoolExecutor as Pool\ndef init(): {SET}\nPool(initializer=init)",
        "from concurrent.futures import ThreadPoolExecutor\n"
        f"def work(i): {SET}\nwith ThreadPoolExecutor() as pool: list(pool.map(work, range(2)))",
        f"def work(i): {SET}\ndef go(pool): pool.submit(work, 1)",
        f"class W:\n  def run(self): {SET}\nw = W()\nThread(target=w.run).start()",
        f"class D:\n  def __init__(self): {SET}\ndef work(): D()\nThread(target=work)",
        '@config.patch("triton.cudagraph_trees", False)\ndef work(): pass\nThread(target=work)',
        'def work():\n  with config.patch({"triton.cudagraph_trees": False}): pass\nThread(target=work)',
    ],
)
def test_trees_config_in_a_worker_is_right(tmp_path: Path, source: str) -> None:
    assert findings(tmp_path, HEAD + source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch._inductor.config.triton.cudagraph_trees",
        "from torch._inductor import config\nconfig.triton.cudagraphs = True",
        'from torch._inductor import config\nconfig.patch({"triton.cudagraphs": True})',
        'import torch\ntorch.compile(f, options={"triton.cudagraph_trees": False})',
        "from mine import config\nconfig.triton.cudagraph_trees = False",
    ],
)
def test_trees_config_leaves_alone(tmp_path: Path, source: str) -> None:
    assert findings(tmp_path, source) == []


def test_a_process_is_no_worker_thread(tmp_path: Path) -> None:
    source = f"{HEAD}import multiprocessing\ndef work(): {SET}\nmultiprocessing.Process(target=work)"
    assert hits(tmp_path, source, "trees-config-outside-worker") == [5]


# -- what runs in threads, over all files of a release


def test_a_trainer_in_threads_that_does_it_right_is_clean(tmp_path: Path) -> None:
    assert check(write(tmp_path, threaded.FILES), python=None) == []


def broken(tmp_path: Path, patch: tuple[str, str, str]) -> list[Finding]:
    path, before, after = patch
    assert threaded.FILES[path].count(before) == 1
    files = {**threaded.FILES, path: threaded.FILES[path].replace(before, after)}
    return check(write(tmp_path, files), python=None)


@pytest.mark.parametrize("rule", threaded.ERRORS)
def test_a_patch_that_one_rule_alone_stops(tmp_path: Path, rule: str) -> None:
    found = broken(tmp_path, threaded.ERRORS[rule])
    assert {finding.rule for finding in found if finding.blocks} == {rule}


@pytest.mark.parametrize("rule", threaded.WARNINGS)
def test_a_patch_that_one_rule_alone_warns_of(tmp_path: Path, rule: str) -> None:
    found = broken(tmp_path, threaded.WARNINGS[rule])
    assert [(finding.rule, finding.blocks) for finding in found] == [(rule, False)]


def test_every_rule_has_such_a_patch_and_a_section() -> None:
    rules = {rule.id for rule in RULES}
    assert rules == {*threaded.ERRORS, *threaded.WARNINGS}
    sections = (ROOT / "docs/checks.md").read_text(encoding="utf-8").split("\n## ")
    assert rules <= {section.split("\n")[0].split(" ")[0] for section in sections}


# file, text, what it becomes; the finding
BUNDLED = [
    (
        "workers.py",
        "            with self._gate.exclusive(self.name):\n                replica =",
        "            replica =",
        ("compile-outside-gate", "compile/strategies/reduce_overhead.py"),
    ),
    (
        "compile/thread.py",
        "            torch.cuda.set_device(device)\n",
        "",
        ("worker-without-device", "compile/strategies/reduce_overhead.py"),
    ),
    (
        "workers.py",
        "        normaliser = torch.full(",
        "        torch.manual_seed(step)\n        normaliser = torch.full(",
        ("global-seed-in-worker", "workers.py"),
    ),
    (
        "step.py",
        "        sums = self._step.accumulate(",
        "        torch.randn_like(batch.features)\n        sums = self._step.accumulate(",
        ("default-generator-draw", "step.py"),
    ),
    (
        "compile/separate.py",
        "        self._gradients.backward(",
        "        torch.compiler.cudagraph_mark_step_begin()\n        self._gradients.backward(",
        ("mark-step-in-thread", "compile/separate.py"),
    ),
    (
        "compile/base_step.py",
        'private_function(plan.definition.loss, f"{plan.name}_bucket_{index}")',
        "plan.definition.loss",
        ("shared-code-object", "compile/strategies/reduce_overhead.py"),
    ),
    (
        "exchange.py",
        "        self._summed[worker] = _record(devices)\n",
        "        self._summed[worker] = _record(devices)\n        for each in devices: torch.cuda.synchronize(each)\n",
        ("device-synchronize-in-worker", "exchange.py"),
    ),
]


def test_the_bundled_trainer_is_clean_and_what_breaks_it_is_found_in_it(tmp_path: Path) -> None:
    clean, dirty = tmp_path / "clean/trainer", tmp_path / "dirty/trainer"
    for tree in (clean, dirty):
        shutil.copytree(ROOT / "trainer", tree, ignore=shutil.ignore_patterns("__pycache__"))
    assert check(clean.parent, python=None) == []
    for name, before, after, _ in BUNDLED:
        file = dirty / name
        source = file.read_text(encoding="utf-8")
        assert source.count(before) == 1, before
        file.write_text(source.replace(before, after), encoding="utf-8")
    found = {(finding.rule, finding.path.removeprefix("trainer/")) for finding in check(dirty.parent, python=None)}
    assert {finding for *_, finding in BUNDLED} <= found


THREAD = """\
import threading
import torch
GATE = threading.Lock()
MODE = "reduce-overhead"
"""
WORK = f"{THREAD}def main(): threading.Thread(target=work).start()\n"


def in_worker(tmp_path: Path, body: str, *, head: str = WORK) -> list[tuple[str, str, int]]:
    """Findings (rule, severity, line of the body) of a worker that does `body`."""
    source = head + "def work(device=None, x=None, model=None):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    assert all(finding.fix and finding.why.count("\n") <= 1 for finding in findings(tmp_path, source))
    first = head.count("\n") + 1
    return [(each.rule, each.severity.value, each.line - first) for each in findings(tmp_path, source)]


DRAWS = [
    ("torch.rand(2, device='cuda')", "error"),
    ("torch.randn(2, device=device)", "error"),
    ("torch.randint(0, 9, (2,), device=torch.device('cuda', 1))", "error"),
    ("torch.rand_like(x)", "error"),
    ("torch.multinomial(x, 1)", "error"),
    ("torch.bernoulli(x)", "error"),
    ("x.normal_()", "error"),
    ("x.weight.data.uniform_(-1, 1)", "error"),
    ("torch.nn.init.xavier_uniform_(x)", "error"),
    ("torch.nn.Linear(2, 2, device=device)", "error"),
    ("torch.rand(2, device=device, generator=None)", "error"),
    ("torch.rand(2)", "warning"),
    ("torch.randperm(9)", "warning"),
    ("torch.randn(2, device='cpu')", "warning"),
    ("torch.empty(3).normal_()", "warning"),
    ("torch.nn.Linear(2, 2)", "warning"),
    ("torch.nn.functional.dropout(x, 0.1)", "warning"),
    ("torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)", "warning"),
]


@pytest.mark.parametrize(("body", "severity"), DRAWS)
def test_a_draw_from_a_default_generator(tmp_path: Path, body: str, severity: str) -> None:
    assert in_worker(tmp_path, body) == [("default-generator-draw", severity, 1)]


def test_without_cuda_graphs_there_is_no_capture_to_break(tmp_path: Path) -> None:
    head = WORK.replace("reduce-overhead", "default")
    draw = in_worker(tmp_path, "torch.rand(2, device=device)", head=head)
    wait = in_worker(tmp_path, "torch.cuda.synchronize()", head=head)
    assert [draw, wait] == [
        [("default-generator-draw", "warning", 1)],
        [("device-synchronize-in-worker", "warning", 1)],
    ]


@pytest.mark.parametrize(
    "body",
    [
        "g = torch.Generator(device); torch.rand(2, generator=g, device=device)",
        "x.normal_(generator=x.generator)",
        "torch.nn.init.normal_(x, generator=x)",
        "torch.rand(2, **x)",
        "with GATE: torch.rand(2, device=device)",
        "torch.nn.Linear(2, 2, device='meta')",
        "torch.nn.functional.dropout(x, 0.0)",
        "torch.nn.functional.dropout(x, 0.1, training=False)",
        "torch.nn.functional.scaled_dot_product_attention(x, x, x)",
        "import random; random.random()",
        "import numpy as np; np.random.normal(0, 1)",
    ],
)
def test_a_draw_that_is_right(tmp_path: Path, body: str) -> None:
    assert in_worker(tmp_path, body) == []
    main_thread = (
        WORK + "def work(): pass\ndef prepare(x, device):\n    torch.rand(2, device=device)\n    x.normal_()\n"
    )
    assert findings(tmp_path, main_thread) == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("torch.manual_seed(1)", ("global-seed-in-worker", "error", 1)),
        ("torch.cuda.manual_seed_all(1)", ("global-seed-in-worker", "error", 1)),
        ("torch.cuda.manual_seed(1)", ("global-seed-in-worker", "warning", 1)),
        ("with torch.random.fork_rng(): pass", ("global-seed-in-worker", "warning", 1)),
        ("torch.cuda.synchronize()", ("device-synchronize-in-worker", "error", 1)),
        ("torch.cuda.set_device(0); torch.cuda.synchronize()", ("device-synchronize-in-worker", "error", 1)),
        ("torch.compiler.reset()", ("global-reset-in-worker", "error", 1)),
        ("with GATE: torch._dynamo.reset()", ("global-reset-in-worker", "error", 1)),
        ("torch.compiler.set_stance('force_eager')", ("silent-eager", "error", 1)),
        ("torch.compiler.cudagraph_mark_step_begin()", ("mark-step-in-thread", "error", 1)),
    ],
)
def test_what_a_worker_may_not_do_to_the_process(tmp_path: Path, body: str, expected: tuple[str, str, int]) -> None:
    assert in_worker(tmp_path, body) == [expected]


@pytest.mark.parametrize(
    "body",
    [
        "torch.Generator().manual_seed(1)",
        "with GATE: torch.manual_seed(1)",
        "with GATE: torch.cuda.synchronize()",
        "torch.cuda.synchronize(device)",
        "torch.cuda.current_stream(device).synchronize()",
        "torch.compiler.set_stance('fail_on_recompile')",
    ],
)
def test_what_a_worker_may_do(tmp_path: Path, body: str) -> None:
    assert in_worker(tmp_path, body) == []


@pytest.mark.parametrize(
    ("capture", "rule"),
    [
        ("torch.cuda.graph(x)", ("global-capture-mode", "error")),
        ("torch.cuda.graph(x, capture_error_mode='global')", ("global-capture-mode", "error")),
        ("torch.cuda.make_graphed_callables(model, (x,))", ("global-capture-mode", "error")),
        ("torch.cuda.graph(x, None, None, 'thread_local')", None),
        ("torch.cuda.make_graphed_callables(model, (x,), capture_error_mode='thread_local')", None),
    ],
)
def test_a_capture_in_the_global_mode(tmp_path: Path, capture: str, rule: tuple[str, str] | None) -> None:
    in_a_worker = in_worker(tmp_path, f"torch.cuda.set_device(device)\nwith GATE: {capture}")
    assert [found[:2] for found in in_a_worker] == ([] if rule is None else [rule])
    main_thread = f"{WORK}def work(x): x.backward()\ndef capture(x, model): {capture}\n"
    found = [(each.rule, each.severity.value) for each in findings(tmp_path, main_thread)]
    assert found == ([] if rule is None else [(rule[0], "warning")])


@pytest.mark.parametrize(
    ("body", "severity"),
    [
        ("torch._dynamo.config.recompile_limit = 64", "error"),
        ("setattr(torch._dynamo.config, 'recompile_limit', 64)", "error"),
        ("torch._inductor.config.load_config({'max_autotune': True})", "error"),
        ("with torch._dynamo.config.patch(recompile_limit=64): torch.compile(model)", "warning"),
    ],
)
def test_configuration_that_no_worker_sees(tmp_path: Path, body: str, severity: str) -> None:
    head = f"{WORK}def setup(model):\n    {body}\n"
    compiles = "with GATE: torch.compile(model)"
    assert in_worker(tmp_path, compiles, head=head) == [("config-outside-worker", severity, -1)]
    assert in_worker(tmp_path, "pass", head=head) == []
    in_the_worker = in_worker(tmp_path, f"{body}\n{compiles}")
    assert "config-outside-worker" not in {rule for rule, *_ in in_the_worker}


COMPILE = "torch.compile(model)"


@pytest.mark.parametrize(
    "body",
    [
        COMPILE,
        "model.compile(mode='default')",
        "torch.cuda.make_graphed_callables(model, (x,), capture_error_mode='thread_local')",
        f"lock = threading.Lock()\nwith lock: {COMPILE}",  # every worker makes its own
        f"with torch.no_grad(): {COMPILE}",
        f"GATE.acquire()\nx()\nGATE.release()\n{COMPILE}",
        "@torch.compile\ndef step(x): return x\nstep(x)",
    ],
)
def test_compiling_outside_a_gate(tmp_path: Path, body: str) -> None:
    assert {rule for rule, severity, _ in in_worker(tmp_path, body) if severity == "error"} == {"compile-outside-gate"}


@pytest.mark.parametrize(
    "body",
    [
        f"with GATE: {COMPILE}",
        f"with device.gate.exclusive('me'): {COMPILE}",
        f"with (GATE if x else device): {COMPILE}",
        f"GATE.acquire()\ntry: {COMPILE}\nfinally: GATE.release()",
        f"while not GATE.acquire(timeout=1): pass\n{COMPILE}",
        f"import contextlib\nwith contextlib.ExitStack() as stack:\n    stack.enter_context(GATE)\n    {COMPILE}",
        f"def build(): return {COMPILE}\nwith GATE: build()",
        "import re\nre.compile('x')",
        "device.compile(x)",
    ],
)
def test_compiling_inside_a_gate(tmp_path: Path, body: str) -> None:
    assert in_worker(tmp_path, body) == []


def test_a_first_call_outside_the_gate(tmp_path: Path) -> None:
    head = THREAD + "@torch.compile\ndef step(x): return x\ndef main(): threading.Thread(target=work).start()\n"
    assert in_worker(tmp_path, "step(x)", head=head) == [("compile-outside-gate", "error", 1)]
    warmed = "with GATE: step(x)\nstep(x)"
    assert in_worker(tmp_path, warmed, head=head) == []
    in_main = head.replace("def main(): ", "def main():\n    step(1)\n    ")
    assert in_worker(tmp_path, "step(x)", head=in_main) == []


def test_a_lock_of_each_thread_object_is_no_gate(tmp_path: Path) -> None:
    source = """\
        import threading, torch
        class W(threading.Thread):
            def __init__(self, lock):
                super().__init__()
                self._lock = LOCK
            def run(self):
                with self._lock: torch.compile(print)
        """
    assert findings(tmp_path, source.replace("LOCK", "lock")) == []
    (finding,) = findings(tmp_path, source.replace("LOCK", "threading.Lock()"))
    assert finding.rule == "compile-outside-gate"


GRAPHED = (
    "import torch\nstep = torch.compile(print, mode='reduce-overhead')\n"
    "eager = torch.compile(print)\ng = torch.cuda.CUDAGraph()\n"
)
KEPT = [
    "kept = []\nfor x in data:\n    kept.append(step(x))",
    "kept = []\nfor x in data:\n    loss = step(x)\n    kept.append(loss.detach())",
    "kept = []\nfor x in data:\n    loss, extra = step(x)\n    kept.append((x, extra[0]))",
    "kept = []\nwhile True:\n    kept += [step(x).view(-1)]",
    "kept = {}\nfor i in range(9):\n    kept[i] = step(i).logits",
    "kept = [None] * 9\nfor i in range(9):\n    kept[i] = step(i)",
    "kept = [step(x) for x in data]",
    "class A:\n    def call(self, x):\n        self.kept.append(step(x).detach())",
    "def run(x): return step(x)\nkept = []\nfor x in data: kept.append(run(x))",
    "with torch.cuda.graph(g):\n    y = f(x)\nkept = []\nfor x in data:\n    g.replay()\n    kept.append(y)",
    "import functools\n@functools.partial(torch.compile, options={'triton.cudagraphs': True})\n"
    "def f(x): return x\nkept = [f(x) for x in data]",
]


@pytest.mark.parametrize("source", KEPT)
def test_an_output_that_is_kept(tmp_path: Path, source: str) -> None:
    assert [finding.rule for finding in findings(tmp_path, GRAPHED + source)] == ["output-kept-across-steps"]


@pytest.mark.parametrize(
    "source",
    [
        "kept = []\nfor x in data:\n    kept.append(step(x).clone())",
        "kept = []\nfor x in data:\n    kept.append(step(x).item())",
        "kept = []\nfor x in data:\n    kept.append(float(step(x)))",
        "kept = []\nfor x in data:\n    kept.append(step(x) + 1)",
        "kept = []\nfor x in data:\n    kept.append(step(x).shape)",
        "kept = []\nfor x in data:\n    kept.append(eager(x))",
        "for x in data:\n    parts = []\n    parts.append(step(x))",
        "total = sum(step(x).item() for x in data)",
        "kept = torch.zeros(9)\nfor i in range(9):\n    kept[i] = step(i)",
        "for x in data:\n    last = step(x)",
        "def call(x):\n    kept = []\n    kept.append(step(x))\n    return kept",
        "with torch.cuda.graph(g):\n    y = f(x)\nkept = []\nfor x in z:\n    g.replay()\n    kept.append(y.clone())",
    ],
)
def test_an_output_that_is_copied_or_let_go(tmp_path: Path, source: str) -> None:
    assert findings(tmp_path, GRAPHED + source) == []


NO_TREES = "options={'triton.cudagraphs': True, 'triton.cudagraph_trees': False}"
OPTIMIZER = "import torch\noptimizer = make()\n"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        (f"torch.compile(optimizer.step, {NO_TREES})", 1),
        (f"adam = torch.optim.Adam(p)\ntorch.compile(adam.step, {NO_TREES})", 1),
        (f"step = optimizer.step\ntorch.compile(step, {NO_TREES})", 1),
        (f"@torch.compile({NO_TREES})\ndef update(): optimizer.step()", 1),
        (f"torch.compile(lambda: optimizer.step(), {NO_TREES})", 1),
        (f"torch.compile(scheduler.step, {NO_TREES})", 0),
        (f"torch.compile(optimizer, {NO_TREES})", 0),
        ("torch.compile(optimizer.step)", 0),
        ("torch.compile(optimizer.step, mode='reduce-overhead')", 0),  # trees: nothing happens twice
        (
            "torch.compile(optimizer.step, options={'triton.cudagraphs': True, 'triton.cudagraph_trees': False, "
            "'triton.cudagraph_support_input_mutation': False})",
            0,
        ),
    ],
)
def test_a_compiled_optimizer_step(tmp_path: Path, source: str, count: int) -> None:
    rules = [finding.rule for finding in findings(tmp_path, OPTIMIZER + source)]
    assert rules == ["compiled-optimizer-step"] * count


CAPTURED = "import torch\nmodel = make()\nstep = torch.compile(model, mode='reduce-overhead')\n"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("model.load_state_dict(weights, assign=True)", 1),
        ("model.to('cuda')", 1),
        ("model.half()", 1),
        ("model.head.weight.data = other", 1),
        ("for p in model.parameters(): p.data = p.data.half()", 1),
        ("for name, p in model.named_parameters():\n    p.data = other[name]", 1),
        ("torch.nn.utils.vector_to_parameters(v, model.parameters())", 1),
        ("model.load_state_dict(weights)", 0),
        ("other.load_state_dict(weights, assign=True)", 0),
        ("y = model.to('cuda')", 0),
        ("for p in model.parameters(): p.data.copy_(q)", 0),
    ],
)
def test_weights_that_move(tmp_path: Path, source: str, count: int) -> None:
    rules = [finding.rule for finding in findings(tmp_path, CAPTURED + source)]
    assert rules == ["weights-moved-after-capture"] * count


def test_weights_may_move_before_the_capture(tmp_path: Path) -> None:
    before = "import torch\ndef f(model):\n    model.to('cuda')\n    return torch.compile(model, mode='max-autotune')\n"
    assert findings(tmp_path, before) == []
    no_graphs = "import torch\nstep = torch.compile(model)\nmodel.to('cuda')\n"
    assert findings(tmp_path, no_graphs) == []


@pytest.mark.parametrize(
    "source",
    [
        "torch._inductor.config.size_asserts = False",
        "torch._inductor.config.patch(size_asserts=False)",
        "torch.compile(f, options={'size_asserts': False})",
        "os.environ['TORCHINDUCTOR_SIZE_ASSERTS'] = '0'",
        "os.environ.setdefault('TORCHINDUCTOR_SIZE_ASSERTS', '0')",
        "os.environ.update(TORCHINDUCTOR_SIZE_ASSERTS='0')",
    ],
)
def test_size_asserts(tmp_path: Path, source: str) -> None:
    (finding,) = findings(tmp_path, f"import os, torch\n{source}")
    assert (finding.rule, finding.severity.value) == ("size-asserts-off", "warning")  # an error where threads train
    assert findings(tmp_path, f"import os, torch\n{source}".replace("False", "True").replace("'0'", "'1'")) == []


def test_without_threads_there_is_nothing_to_say_of_them(tmp_path: Path) -> None:
    source = """\
        import torch
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.error_on_nested_fx_trace = False
        torch.manual_seed(0)
        step = torch.compile(torch.nn.Linear(2, 2), mode="reduce-overhead")
        torch.compiler.cudagraph_mark_step_begin()
        step(torch.rand(2, device="cuda")).sum().backward()
        torch.cuda.synchronize()
        torch.compiler.reset()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step(x)
        """
    assert findings(tmp_path, source) == []


def test_what_a_test_hands_to_a_worker_is_not_what_the_release_runs(tmp_path: Path) -> None:
    files = {
        "lib.py": "import threading\ndef go(work): threading.Thread(target=work).start()\n",
        "tests/test_lib.py": "import torch\nfrom lib import go\ndef fake(): torch.manual_seed(0)\ngo(fake)\n",
    }
    assert check(write(tmp_path / "a", files), python=None) == []
    files["main.py"] = files.pop("tests/test_lib.py")
    assert [each.rule for each in check(write(tmp_path / "b", files), python=None)] == ["global-seed-in-worker"]


@pytest.mark.parametrize(
    "source",
    [
        "def f(x=f): return f(f)(f)\nclass A(A): x = A\na = b\nb = a\nfor a in a: a.b.c = a",
        "import threading\nclass T(threading.Thread):\n  def run(self): self.run(); self.x = self; self.x.x.run()\nT()",
        "lambda: (yield)\nx = lambda *a, **k: x(*a, **k)\nx(**x)",
        "import torch\n@torch.compile(mode='reduce-overhead')\ndef f(x): return f(f(x))\nfor i in f: i.append(f(i))",
        "from . import a\nfrom .. import b\nfrom ...c import d\na.b(b.c(d))",
        "from x import *\nimport x.y as x\nmatch x:\n    case {'a': x, **x}: x.submit(x)",
        "threading.Thread(**{'target': 1})\nx.submit()\nx.map()\nrun_in_executor(*a)",
        "with (f := 3) as (a, [*b]), a.b as c.d: a.acquire(); a.release()\nasync def g():\n    async with a: await a",
        "def outer():\n    a = 1\n    def inner():\n        nonlocal a\n        a = inner\n    return inner",
    ],
)
def test_odd_files_are_read(tmp_path: Path, source: str) -> None:
    files = {"x.py": source, "a/__init__.py": source, "x/__init__.py": "from x import x\n", "x/y.py": "import x.x\n"}
    assert all(finding.rule for finding in check(write(tmp_path, files), python=None))
