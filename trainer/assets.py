"""Where named inputs lie: plain paths and `package:NAME/FILE`, a file of an installed Python package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from trainer.errors import InputError

_PREFIX = "package:"


def resolve_asset(name: str, where: str) -> Path:
    """The existing path that `name` means; `where` is the setting it came from. Raises `InputError`.

    The package is located, never imported.
    """
    if not name.startswith(_PREFIX):
        path = Path(name).expanduser()
        if not path.exists():
            raise InputError(f"{name} does not exist", where, _nearest_path(path))
        return path
    package, slash, inside = name[len(_PREFIX) :].partition("/")
    if not slash or not package.isidentifier() or not inside:
        raise InputError(f"{name!r} names no file", where, "write package:NAME/FILE")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"Python package {package!r} is not installed", where, f"install the distribution that has {package!r}"
        )
    root = Path(next(iter(spec.submodule_search_locations))).resolve()
    path = (root / inside).resolve()
    if not path.is_relative_to(root):
        raise InputError(f"{name!r} leaves the package", where, "write package:NAME/FILE")
    if not path.exists():
        raise InputError(f"package {package!r} has no file {inside!r}", where, _nearest_path(path))
    return path


def _nearest_path(path: Path) -> str:
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    names = sorted(each.name for each in folder.iterdir() if not each.name.startswith(("_", ".")))[:8]
    return f"{folder} holds {', '.join(names) or 'nothing'}"
