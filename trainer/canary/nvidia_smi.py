"""What nvidia-smi says of the GPUs. Which fields it knows depends on the driver: those it does not are left out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence

_TIME_S = 60
_UNKNOWN = re.compile(r'Field "([^"]+)" is not a valid field to query')
_NOTHING = re.compile(r"\[?(N/A|Not Supported|Unknown Error|GPU requires reset|Insufficient Permissions)\]?", re.I)
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"

Facts = dict[str, dict[str, str]]
"""By UUID: what is known, by field."""


def query(fields: Sequence[str], *, what: str = "gpu", uuid: str = "uuid") -> Facts | None:
    """`fields` of every GPU, from `--query-<what>`; None where nvidia-smi is not there or says nothing.

    `uuid` is the field's name in that query. What a GPU does not support is left out of its answer.
    """
    program = shutil.which("nvidia-smi", path=os.environ.get("PATH", "") + ":" + _SYSTEM_PATH)
    if program is None:
        return None
    asked = [uuid, *fields]
    while True:
        call = [program, f"--query-{what}={','.join(asked)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(
                call, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIME_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0:
            return _parsed(asked, done.stdout)
        unknown = _UNKNOWN.search(done.stdout + done.stderr)
        if unknown is None or unknown[1] not in asked[1:]:
            return None
        asked.remove(unknown[1])


def _parsed(asked: Sequence[str], text: str) -> Facts:
    found: Facts = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(asked):
            told = zip(asked[1:], values[1:], strict=True)
            found[values[0]] = {name: value for name, value in told if value and not _NOTHING.fullmatch(value)}
    return found
