"""How much room there is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional


def free_bytes(folder: Path) -> int:
    """For this user, on its disk. Raises OSError."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def free_bytes_near(path: Path) -> Optional[int]:
    """On the disk of `path`, or of what is there of it; None where nobody can say."""
    for place in (path, *path.parents):
        try:
            return free_bytes(place)
        except OSError:
            continue
    return None
