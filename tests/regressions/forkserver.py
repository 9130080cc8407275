"""`python forkserver.py`: runs `python -m trainer` of many release trees, each in a fork of this one process.

What is saved is the import of torch and its friends, seconds for each canary; the trainer itself is imported anew, from
its own tree. One request a line on standard input: {"root", "arguments", "log", "limit_s"}; one answer a line on
standard output: {"code"}, negative for the signal that ended it (SIGKILL after `limit_s`). For CPUs: CUDA does not
survive a fork.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from typing import Any, NoReturn

PRELOADED = ("torch", "torch._dynamo", "torch._inductor.compile_fx", "transformers", "datasets", "safetensors.torch")
# read by libraries when they are first imported, which here is before trainer.__main__ sets them
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["TQDM_DISABLE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# a pool of compile workers would be shared between forks
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def main() -> None:
    """Serve until standard input ends."""
    sys.path.pop(0)  # this folder
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    for name in PRELOADED:
        importlib.import_module(name)
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401 -- lazily imported

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(request)
        print(json.dumps({"code": _wait(child, request["limit_s"])}), file=answers, flush=True)


def _wait(child: int, limit_s: int) -> int:
    # the signal's handler need not do anything but interrupt the wait
    signal.signal(signal.SIGALRM, lambda _number, _frame: os.kill(child, signal.SIGKILL))
    signal.alarm(limit_s)
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    return os.waitstatus_to_exitcode(status)


def _run(request: dict[str, Any]) -> NoReturn:
    root = request["root"]
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, number)
    os.chdir(root)
    sys.path.insert(0, root)
    sys.argv = ["trainer", *request["arguments"]]
    code = 1
    try:
        runpy.run_module("trainer", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
