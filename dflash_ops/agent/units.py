"""What systemd remembers of a run's unit: a hint at how a run ended that left no exit.json."""

from __future__ import annotations

import shutil
import signal
import subprocess
from typing import Dict, Optional

from .devices import search_path

_ASKED_S = 5.0
_PROPERTIES = ("LoadState", "ActiveState", "Result", "ExecMainCode", "ExecMainStatus")
_EXITED, _KILLED, _DUMPED = "1", "2", "3"
"""ExecMainCode: the si_code of waitid(2)."""
_RESULTS = {
    "oom-kill": "the kernel killed a process of it for its memory",
    "timeout": "it did not stop in time and was killed",
    "watchdog": "it did not answer systemd's watchdog",
    "resources": "systemd had no resources to start it",
}


def ending_of(unit: str) -> Optional[str]:
    """How the unit's main process, the run's supervisor, ended; None where systemd does not know (any more).

    A unit that came to a good end, or was reset, is forgotten at once.
    """
    program = shutil.which("systemctl", path=search_path())
    if program is None:
        return None
    command = [program, "show", f"{unit}.service", f"--property={','.join(_PROPERTIES)}"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASKED_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (line.partition("=") for line in done.stdout.splitlines())
    return in_words({name: value for name, _, value in lines}) if done.returncode == 0 else None


def in_words(shown: Dict[str, str]) -> Optional[str]:
    """`shown`: what `systemctl show` says of a unit."""
    result, code, status = (shown.get(name, "") for name in ("Result", "ExecMainCode", "ExecMainStatus"))
    if shown.get("LoadState") != "loaded" or shown.get("ActiveState") != "failed" or not result:
        return None
    if code in (_KILLED, _DUMPED) and status.isdigit():
        how = f"was killed by {_signal_name(int(status))}" + (", with a core dump" if code == _DUMPED else "")
    elif code == _EXITED:
        how = f"ended with exit code {status}"
    else:
        how = ""
    said = [f"its supervisor {how}" if how else "", _RESULTS.get(result, "")]
    return f"systemd has its unit as failed ({result}): " + "; ".join(one for one in said if one)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
