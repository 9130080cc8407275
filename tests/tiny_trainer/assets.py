"""Paths of settings: a file, or `package:NAME/FILE` for a file of an installed package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .errors import InputError


def resolve(name: str, where: str) -> Path:
    """Return the existing path that a setting names."""
    if not name.startswith("package:"):
        path = Path(name).expanduser()
        if not path.exists():
            raise InputError(f"{name} does not exist", where, "give an existing path")
        return path
    package, _, file = name[len("package:") :].partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / file
        if file and path.is_file():
            return path
    raise InputError(f"{name} is not there", where, "give package:NAME/FILE of an installed package")
