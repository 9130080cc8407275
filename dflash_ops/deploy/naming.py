"""How runs and releases are named. What can be no name is refused here, before any host is reached."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import PurePath

from dflash_ops.agent.arguments import RUN_NAME
from dflash_ops.errors import ExitCode, OpsError

DIGITS = 8
"""Of a digest, so that a name does not fit by accident."""
HOW = f"say `current`, `previous` or at least {DIGITS} digits of one; without --release it is built anew"
WORDS = ("current", "previous")
LONGEST_SHOWN = 200
_BEGINNING = re.compile(r"[0-9a-f]{1,64}")


def refuse_no_release(name: str, *, asks_host: bool) -> None:
    """Raises OpsError (exit 2) where no release can be called so. Of one that is only too short a host that is asked
    can say more: which are there."""
    short = len(name) < DIGITS and not asks_host
    if name not in WORDS and (short or not _BEGINNING.fullmatch(name)):
        raise OpsError(
            f"{_shown(name)} is no name of a release",
            exit_code=ExitCode.USAGE,
            kind="unknown_release",
            where="--release",
            fix=HOW,
        )


def is_run_name(name: str) -> bool:
    """Whether any run can be called so."""
    return RUN_NAME.fullmatch(name) is not None


def refuse_no_run(name: str, known: Iterable[str], where: str = "RUN") -> None:
    """Raises OpsError (exit 2) where no run can be called so. `known`: names of runs, one of which may be meant."""
    if is_run_name(name):
        return
    # a folder that was completed by the shell: runs/NAME/
    inner = PurePath(name.strip().split(":")[0]).name
    near = [inner] if is_run_name(inner) else difflib.get_close_matches(name[:LONGEST_SHOWN], list(known), n=1)
    raise OpsError(
        f"{_shown(name)} is no name of a run: letters, digits, '.', '_' or '-' (at most 100), no sign first",
        exit_code=ExitCode.USAGE,
        kind="request",
        where=where,
        fix=f"did you mean '{near[0]}'?" if near else "their names: dflash-ops runs",
    )


def _shown(name: str) -> str:
    return repr(name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}...")
