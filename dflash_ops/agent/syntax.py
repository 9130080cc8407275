"""Whether a release compiles under a Python of the host.

What did once is not asked again: a release is named by its content, which staging and the gate compare with the files.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from .arguments import Arguments
from .errors import AgentError, ExitCode
from .files import read_json, write_json
from .pythons import ask_python, find_python
from .releases import find_release

if TYPE_CHECKING:
    from .conversation import Conversation

_COMPILE = """
import json, os, sys
bad, count = [], 0
for folder, folders, names in os.walk(sys.argv[1]):
    folders.sort()
    for name in sorted(names):
        if name.endswith(".py"):
            count += 1
            path = os.path.join(folder, name)
            try:
                with open(path, "rb") as source:
                    compile(source.read(), path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                bad.append({"path": os.path.relpath(path, sys.argv[1]), "line": getattr(error, "lineno", None),
                            "message": getattr(error, "msg", None) or str(error)})
print(json.dumps([count, bad]))
"""
_KEPT = 100


def op_syntax(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    release = find_release(conversation.work, args.digest())
    python = find_python(args.text("python"))
    memory = _Memory(conversation.work.root / "compiled.json", f"{release.name} {python}", _identity(python))
    known = memory.recall()
    if known is not None:
        return {"files": known}
    command = [python, "-I", "-S", "-c", _COMPILE, str(release)]
    count, bad = ask_python(command, python, None, "compile the release")
    if bad:
        first = bad[0]
        raise AgentError(
            "syntax",
            f"{len(bad)} of {count} files do not compile under {python}: {first['message']}",
            f"{first['path']}, line {first['line']}",
            "correct the file, or choose a newer python for this host",
            ExitCode.REFUSED,
            bad,
        )
    memory.keep(count)
    return {"files": count}


def _identity(python: str) -> List[int]:
    """An interpreter that is replaced is another one."""
    status = os.stat(python)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


class _Memory:
    """How many files of a release compiled, by release and Python; only a hint, and lost without harm."""

    def __init__(self, path: Path, key: str, identity: List[int]) -> None:
        self._path, self._key, self._identity = path, key, identity

    def recall(self) -> Optional[int]:
        found = (read_json(self._path) or {}).get(self._key)
        if isinstance(found, list) and len(found) == 2 and found[0] == self._identity and type(found[1]) is int:
            return found[1]
        return None

    def keep(self, count: int) -> None:
        known = {**(read_json(self._path) or {}), self._key: [self._identity, count]}
        with suppress(OSError):
            write_json(self._path, dict(list(known.items())[-_KEPT:]), durable=False)
