"""The host's Pythons: finding one, and what is installed in it."""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from .accounts import Account, own_home, popen_options
from .devices import search_path
from .errors import AgentError, ExitCode
from .files import digest_of
from .packages import LIST_PACKAGES
from .workdir import SYSTEM_PATH

_USUAL_PLACES = ("/opt/*/bin/python3", "/opt/*/*/bin/python3", "~/*/bin/python3", "~/.*/bin/python3")
_TIMEOUT_S = 300
_LATELY_S = 30.0


@dataclass(frozen=True)
class Environment:
    """What is installed in a Python: `digest` is the sha256 over version and packages."""

    version: str
    executable: str
    packages: Dict[str, str]

    @property
    def digest(self) -> str:
        return digest_of({"version": self.version, "packages": self.packages})


_SEEN: "Dict[Tuple[str, Optional[Account]], Tuple[float, Environment]]" = {}


def find_python(asked: str) -> str:
    """The absolute path of a Python given as a path, a `~` path or a bare name; AgentError `python_missing`.

    Links are kept as they are: a virtual environment is recognised by the path that it was started with.
    """
    if "/" in asked:
        path = os.path.abspath(os.path.expanduser(asked))
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    else:
        found = shutil.which(asked, path=search_path())
        if found is not None:
            return os.path.abspath(found)
    there = candidates()
    raise AgentError(
        "python_missing",
        f"there is no Python at {asked!r}",
        "python of the host",
        f"set `python` to one of: {', '.join(there)}" if there else "install Python there, then set `python`",
        ExitCode.BLOCKED,
        there,
    )


def candidates() -> List[str]:
    names = ["python3", *(f"python3.{minor}" for minor in range(14, 8, -1))]
    found = [shutil.which(name, path=search_path()) for name in names]
    for pattern in _USUAL_PLACES:
        found += sorted(glob.glob(os.path.expanduser(pattern)))
    seen = dict.fromkeys(path for path in found if path is not None and os.access(path, os.X_OK))
    return list(seen)[:20]


def base_environment(python: str, account: Optional[Account]) -> Dict[str, str]:
    """The explicit environment of everything that runs under the host's Python: never the node's own.

    A container's `pct exec` brings the whole environment of the node with it, secrets too.
    """
    values = {
        "PATH": f"{os.path.dirname(python)}:{SYSTEM_PATH}",
        "HOME": own_home() if account is None else account.home,
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }
    for name in ("TMPDIR", "LD_LIBRARY_PATH"):
        if os.environ.get(name):
            values[name] = os.environ[name]
    return values


def ask_python(
    command: List[str],
    python: str,
    account: Optional[Account],
    purpose: str,
    variables: Optional[Dict[str, str]] = None,
) -> Any:
    """Runs a short program of ours under the host's Python; its last line of output, JSON, is the answer."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            cwd="/",
            env={**base_environment(python, account), **(variables or {})},
            timeout=_TIMEOUT_S,
            check=False,
            **popen_options(account),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise _broken(python, purpose, str(error), None) from error
    if done.returncode != 0 or not done.stdout.strip():
        lines = done.stderr.splitlines()[-20:]
        raise _broken(python, purpose, lines[-1] if lines else f"exit code {done.returncode}", lines)
    return json.loads(done.stdout.splitlines()[-1])


def _broken(python: str, purpose: str, why: str, evidence: Optional[List[str]]) -> AgentError:
    return AgentError(
        "python_broken",
        f"{python} could not {purpose}: {why}",
        "python of the host",
        "repair it or name another in `python`",
        ExitCode.BLOCKED,
        evidence,
    )


def probe(python: str, account: Optional[Account] = None) -> Environment:
    """What a job that runs under this Python and account would find installed."""
    command = [python, "-c", LIST_PACKAGES]
    version, executable, packages = ask_python(command, python, account, "list its packages")
    return Environment(version, executable, dict(sorted(packages.items())))


def probe_and_note(python: str, account: Optional[Account]) -> Environment:
    found = probe(python, account)
    _SEEN[python, account] = time.monotonic(), found
    return found


def probed_lately(python: str, account: Optional[Account]) -> Environment:
    """What `probe_and_note` saw seconds ago, else as `probe`: for what is only told, never for the gate."""
    when, found = _SEEN.get((python, account), (0.0, None))
    return found if found is not None and time.monotonic() - when < _LATELY_S else probe(python, account)
