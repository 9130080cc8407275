"""The compile-safety rules: what each finds, and what it leaves alone."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from dflash_ops.release import Finding, check
from tests.release.trees import write


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
