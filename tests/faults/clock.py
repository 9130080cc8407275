"""A clock that jumps, for our processes only.

Python's `time.time` and `time.gmtime` in the agent and in the supervisors add what stands in a file beside the work
directory; the monotonic and the boot-time clock do not jump, as they would not on a host whose clock is set.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

FILE = "clock"
"""Beside the work directory; holds seconds as text."""

_ENTRY = """\
import os as _os, sys as _sys, time as _time
_real_time, _real_gmtime = _time.time, _time.gmtime
_here = _sys.argv[3] if _sys.argv[1] == "serve" else _os.path.join(_sys.argv[2], "..", "..")
_clock = _os.path.join(_here, "..", "{name}")
def _jumped():
    try:
        with open(_clock) as file:
            return _real_time() + float(file.read() or 0)
    except OSError:
        return _real_time()
_time.time = _jumped
_time.gmtime = lambda seconds=None: _real_gmtime(_jumped() if seconds is None else seconds)
"""


def agent_reads_time_from(name: str, bundle: ModuleType) -> None:
    """From now on every agent that `bundle` packs looks for the file `name` beside its work directory."""
    bundle._ENTRY = _ENTRY.format(name=name) + bundle._ENTRY


def jump(parent: Path, seconds: float) -> None:
    """`parent` is the folder that holds the work directory."""
    part = parent / f"{FILE}.new"
    part.write_text(str(seconds))
    # in a container root is another user than here, and it must be able to remove this
    owner = parent.stat()
    os.chown(part, owner.st_uid, owner.st_gid)
    part.replace(parent / FILE)
