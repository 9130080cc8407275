"""Where hosts, playbooks and the trainer are looked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from dflash_ops.config.errors import ConfigError

Bundle = Literal["trainer", "playbooks", "hosts"]

YAML_SUFFIXES = (".yaml", ".yml")


def bundled(name: Bundle) -> Path:
    """The folder that comes with dflash-ops: inside the installed package, or beside it in a checkout.

    Raises ConfigError where neither is there (a broken installation).
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / "_bundled" / name
    if installed.is_dir():
        return installed
    checkout = package.parent
    # in site-packages a folder of that name beside the package would be somebody else's
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    raise ConfigError.one(
        str(package),
        None,
        f"the bundled folder '{name}' is missing",
        "install dflash-ops again: pip install --force-reinstall",
    )


def user_config(env: Mapping[str, str]) -> Path:
    """`$XDG_CONFIG_HOME/dflash-ops`; the specification says to ignore a relative value."""
    base = env.get("XDG_CONFIG_HOME", "")
    home = Path(env["HOME"]) if env.get("HOME") else Path.home()
    return (Path(base) if Path(base).is_absolute() else home / ".config") / "dflash-ops"


def shown(path: Path) -> str:
    """As short as it stays unambiguous: relative below the working directory, absolute elsewhere."""
    absolute = path.absolute()
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def folder_label(folder: Path) -> str:
    """`./hosts` for a folder below the working directory."""
    text = shown(folder)
    if text == ".":
        return "the working directory"
    return text if Path(text).is_absolute() else f"./{text}"


def yaml_files(folder: Path) -> list[Path]:
    """YAML files of a folder, sorted; examples are for copying and are left out."""
    if not folder.is_dir():
        return []
    return sorted(
        file
        for file in folder.iterdir()
        if file.suffix in YAML_SUFFIXES and not file.stem.endswith(".example") and file.is_file()
    )
