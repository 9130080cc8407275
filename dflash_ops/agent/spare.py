"""A little room that is kept back: on a full disk the commands that lead out of it still have their few bytes."""

from __future__ import annotations

import os
from pathlib import Path

from .disk import free_bytes

_BYTES = 256 * 1024
_PLENTY = 16 * 1024 * 1024


def keep_spare(root: Path) -> None:
    """Made while there is plenty of room; a host where that fails has none."""
    path = root / ".spare"
    try:
        if path.exists() or free_bytes(root) < _PLENTY:
            return
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, _BYTES)
        finally:
            os.close(fd)
    except OSError:
        return


def spend_spare(root: Path) -> bool:
    """Whether there was any."""
    try:
        (root / ".spare").unlink()
    except OSError:
        return False
    return True
