"""exit.json: how a run ended."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Dict, Optional

from .files import write_json
from .runs import RunFolder, RunState
from .workdir import WorkDir


def write_exit(
    folder: RunFolder,
    state: RunState,
    *,
    code: Optional[int] = None,
    signal: Optional[int] = None,
    oom_kill: int = 0,
    forced: bool = False,
    error: Optional[str] = None,
    reason: Optional[Dict[str, Any]] = None,
) -> None:
    """The last word on a run. `error`: the job was never started; `reason`: why its supervisor ended it,
    or does not believe its exit code."""
    value = {
        "v": 1,
        "code": code,
        "signal": signal,
        "state": state.value,
        "ended": time.time(),
        "oom_kill": oom_kill,
        "forced": forced,
        "error": error,
        "reason": reason,
    }
    # a run has ended once exit.json is there, so that comes last
    with contextlib.suppress(OSError):
        WorkDir(folder.root).record("exit", run=folder.run, state=state.value, code=code, signal=signal)
    write_json(folder.exit_file, value)
