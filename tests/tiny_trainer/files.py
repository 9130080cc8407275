"""Files that are whole or absent."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def write_bytes(path: Path, data: bytes) -> None:
    """Write to a temporary name, fsync, rename."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write one JSON value; NaN and infinity are refused, since they are not JSON."""
    write_bytes(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Return the hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
