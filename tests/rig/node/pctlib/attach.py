"""`pct exec`: this process becomes lxc-attach."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn


def run(lxc_path: Path, name: str, command: list[str], *, keep_environment: bool) -> NoReturn:
    environment = "--keep-env" if keep_environment else "--clear-env"
    os.execvp("lxc-attach", ["lxc-attach", "-P", str(lxc_path), "-n", name, environment, "--", *command])
