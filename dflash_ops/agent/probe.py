"""What a job that runs under a Python of this host would find: packages, and what kernels are compiled with."""

from __future__ import annotations

import subprocess
from typing import Any, Dict, Optional

from .accounts import Account, find_account, popen_options
from .arguments import Arguments
from .beside import beside
from .conversation import Conversation
from .environments import ManagedEnvironment
from .notify import unusable
from .pythons import ask_python, base_environment, find_python, probe_and_note
from .variables import Variables

_COMPILE_S = 60
_TOOLS = """
import json, os, shutil, sysconfig
def found(variable, *names):
    asked = os.environ.get(variable, "").split()
    return next(filter(None, map(shutil.which, asked[:1] or names)), None)
include = sysconfig.get_paths()["include"]
print(json.dumps({"c": found("CC", "gcc", "clang", "cc"), "cxx": found("CXX", "g++", "clang++", "c++"),
                  "headers": os.path.exists(os.path.join(include, "Python.h")), "include": include}))
"""


def op_probe(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    account = find_account(args.optional_text("user"))
    managed = ManagedEnvironment.of_python(conversation.work, args.text("python"))
    python = find_python(args.text("python"))
    command = args.optional_text("notify")
    plain = Variables.from_arguments(args).plain
    looking = beside(lambda: _tools(python, account, plain))
    found = probe_and_note(python, account)
    return {
        "tools": looking(),
        "version": found.version,
        "executable": found.executable,
        "packages": found.packages,
        "digest": found.digest if managed is None else managed.digest,
        "managed": None if managed is None else managed.digest,
        "notify": None if command is None else unusable(command, python, account),
    }


def _tools(python: str, account: Optional[Account], variables: Dict[str, str]) -> Dict[str, Any]:
    tools = ask_python([python, "-I", "-c", _TOOLS], python, account, "look for compilers", variables)
    return {**tools, "problem": _problem(tools, python, account, variables)}


def _problem(
    tools: Dict[str, Any], python: str, account: Optional[Account], variables: Dict[str, str]
) -> Optional[str]:
    """Why the C compiler does not take Python.h (the C library's headers are another package); None where it does, or
    where one of the two is not there at all."""
    if tools["c"] is None or not tools["headers"]:
        return None
    command = [tools["c"], "-fsyntax-only", "-x", "c", "-I", tools["include"], "-"]
    try:
        done = subprocess.run(
            command,
            input="#include <Python.h>\n",
            capture_output=True,
            text=True,
            errors="replace",
            cwd="/",
            env={**base_environment(python, account), **variables},
            timeout=_COMPILE_S,
            check=False,
            **popen_options(account),
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return None if done.returncode == 0 else (errors[0] if errors else f"exit code {done.returncode}")
