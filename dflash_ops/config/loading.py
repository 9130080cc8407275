"""Finds and loads playbooks; turns a document into a validated model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_ops.config.asset import PREFIX, USERS
from dflash_ops.config.document import Document, KeyPath, read_document
from dflash_ops.config.environment import read_lock
from dflash_ops.config.errors import ConfigError, Problem, nearest
from dflash_ops.config.overrides import Settings, override
from dflash_ops.config.places import YAML_SUFFIXES, bundled, folder_label, user_config, yaml_files
from dflash_ops.config.playbook import BUNDLED, Playbook
from dflash_ops.config.translate import validated


def load_playbook(name_or_path: str, *, sets: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Playbook:
    """Loads a playbook and applies `--set` values to it.

    A path (it has a separator or ends in .yaml) is read as it is; a name is looked up in ./playbooks,
    $XDG_CONFIG_HOME/dflash-ops/playbooks and the bundled playbooks, in this order. In the result
    `trainer.source` and `trainer.patches` are absolute: relative ones are taken from the playbook's folder, or
    from the working directory where they came from `sets`.
    Raises ConfigError.
    """
    path = _find(name_or_path, os.environ if env is None else env)
    settings = override(read_document(path), sets, Playbook)
    settings.data.setdefault("name", path.stem.removesuffix(".example"))
    missing = [*_absolute_sources(settings, path.parent), *_unknown_assets(settings)]
    _absolute_uploads(settings, path.parent)
    missing += _bad_lock(settings, path.parent)
    return validated(Playbook, settings.data, settings.locate, missing)


def _find(name_or_path: str, env: Mapping[str, str]) -> Path:
    as_path = Path(os.path.expanduser(name_or_path))  # noqa: PTH111 -- an unknown `~user` stays as it is
    if as_path.suffix in YAML_SUFFIXES or len(as_path.parts) > 1:
        # os.path: a name that is too long, or none, is not there either
        if not os.path.isfile(as_path):  # noqa: PTH113
            raise ConfigError.one(name_or_path, None, "there is no such playbook file")
        return as_path
    folders = [Path("playbooks"), user_config(env) / "playbooks", bundled("playbooks")]
    known: dict[str, Path] = {}
    for folder in folders:
        for file in yaml_files(folder):
            known.setdefault(file.stem, file)
    if name_or_path not in known:
        searched = ", ".join(dict.fromkeys(folder_label(folder) for folder in folders if folder.is_dir()))
        raise ConfigError.one(searched, None, f"there is no playbook '{name_or_path}'", nearest(name_or_path, known))
    return known[name_or_path]


def _absolute_sources(settings: Settings, home: Path) -> list[Problem]:
    """Makes the trainer's paths absolute in place; tells those that do not exist."""
    trainer = settings.data.get("trainer")
    if not isinstance(trainer, dict):
        return []
    problems: list[Problem] = []

    def absolute(value: Any, path: KeyPath, kind: str) -> Any:
        # what is no path at all is told by the validation
        if not isinstance(value, str) or not value or "\0" in value:
            return value
        origin = settings.locate(path)
        base = home if origin is settings.document else Path.cwd()
        found = Path(os.path.abspath(base / os.path.expanduser(value)))  # noqa: PTH100, PTH111
        if not (os.path.isdir(found) if kind == "folder" else os.path.isfile(found)):  # noqa: PTH112, PTH113
            problems.append(_no_such(origin, path, kind, value, base))
        return str(found)

    if trainer.get("source", BUNDLED) != BUNDLED:
        trainer["source"] = absolute(trainer["source"], ("trainer", "source"), "folder")
    patches = trainer.get("patches")
    if isinstance(patches, list):
        trainer["patches"] = [
            absolute(patch, ("trainer", "patches", number), "file") for number, patch in enumerate(patches)
        ]
    return problems


def _unknown_assets(settings: Settings) -> Iterator[Problem]:
    """Every `asset:NAME` that names none."""
    assets = settings.data.get("assets")
    known = assets if isinstance(assets, dict) else {}
    for section, key in USERS:
        values = settings.data.get(section)
        value = values.get(key) if isinstance(values, dict) else None
        if isinstance(value, str) and value.startswith(PREFIX) and value.removeprefix(PREFIX) not in known:
            name = value.removeprefix(PREFIX)
            hint = nearest(name, known) if known else "name it in the section 'assets'"
            yield settings.locate((section, key)).problem((section, key), f"there is no asset '{name}'", hint)


def _bad_lock(settings: Settings, home: Path) -> Iterator[Problem]:
    """Makes its path absolute in place, as that of the trainer; tells what is wrong in it."""
    section = settings.data.get("environment")
    value = section.get("lock") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(value, str) or not value or "\0" in value:
        return
    origin = settings.locate(("environment", "lock"))
    base = home if origin is settings.document else Path.cwd()
    section["lock"] = os.path.abspath(base / os.path.expanduser(value))  # noqa: PTH100, PTH111
    if not os.path.isfile(section["lock"]):  # noqa: PTH113
        yield _no_such(origin, ("environment", "lock"), "file", value, base)
        return
    found = read_lock(Path(section["lock"]))
    if isinstance(found, Problem):
        yield found


def _absolute_uploads(settings: Settings, home: Path) -> None:
    """Of assets, and of the environment's wheels."""
    assets, environment = settings.data.get("assets"), settings.data.get("environment")
    wheels = environment.get("wheels") if isinstance(environment, dict) else None
    for asset in [*(assets.values() if isinstance(assets, dict) else ()), wheels]:
        value = asset.get("upload") if isinstance(asset, dict) else None
        if isinstance(value, str) and value and "\0" not in value:
            asset["upload"] = os.path.abspath(home / os.path.expanduser(value))  # noqa: PTH100, PTH111


def _no_such(origin: Document, path: KeyPath, kind: str, value: str, base: Path) -> Problem:
    where = folder_label(base)
    hint = f"'{BUNDLED}' is the trainer that comes with dflash-ops" if path[-1] == "source" else ""
    return origin.problem(path, f"there is no {kind} '{value}' (relative to {where})", hint)
