"""Finds the host to use: by name, and where no name was given, by what is plain from the surroundings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_ops.config.document import Document, read_document
from dflash_ops.config.errors import ConfigError, Problem, nearest
from dflash_ops.config.host import Host, section_problems
from dflash_ops.config.places import bundled, folder_label, shown, user_config, yaml_files
from dflash_ops.config.translate import validated

ENVIRONMENT = "DFLASH_OPS_HOST"
LOCAL = "local"
FILE = "file:"
_PATHS = ("identity_file", "known_hosts")


@dataclass(frozen=True)
class _Entry:
    """A host as it stands in a file, not yet validated."""

    name: str
    folder: Path
    document: Document


@dataclass
class _Place:
    """One file or folder of the search order."""

    label: str
    entries: dict[str, _Entry] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def load_host(
    name: str | None,
    inventory: Path | None,
    *,
    env: Mapping[str, str],
    last_host: str | None,
    run_host: str | None = None,
) -> tuple[Host, str]:
    """The host and how it was chosen, for the reader.

    `name` None: the host of the run that is named (`run_host`), if the inventory still has it, then
    $DFLASH_OPS_HOST, then the host of the last run, likewise, then the only host. Searched: `inventory` (file or
    folder); without it ./hosts, then $XDG_CONFIG_HOME/dflash-ops/hosts; last the bundled host `local`. A broken
    file stops only the search for a host that no other file has. Raises ConfigError.
    """
    places = list(_places(inventory, env))
    fallback = _bundled_local()
    known = {entry.name: entry for place in [fallback, *reversed(places)] for entry in place.entries.values()}
    if name is not None:
        return _load(_named(name, known, places, "--host")), "--host"
    if run_host is not None and run_host in known:
        return _load(known[run_host]), "host of that run"
    if env.get(ENVIRONMENT):
        return _load(_named(env[ENVIRONMENT], known, places, f"${ENVIRONMENT}")), f"${ENVIRONMENT}"
    if last_host is not None and last_host in known:
        return _load(known[last_host]), "host of the last run"
    problems = [problem for place in places for problem in place.problems]
    if problems:
        raise ConfigError(problems)
    own = {entry.name: place for place in places for entry in place.entries.values()}
    if len(own) == 1:
        only, place = next(iter(own.items()))
        return _load(known[only]), f"the only host in {place.label}"
    if not own:
        return _load(fallback.entries[LOCAL]), "the only host: no inventory was found"
    labels = ", ".join(place.label for place in places if place.entries)
    raise ConfigError.one(labels, None, "there are several hosts", f"choose one with --host: {', '.join(sorted(own))}")


def all_hosts(inventory: Path | None, *, env: Mapping[str, str]) -> list[Host]:
    """Every host of the inventory, and the bundled `local` where it has been used or there is no other.

    Raises ConfigError where a file is broken.
    """
    places = list(_places(inventory, env))
    problems = [problem for place in places for problem in place.problems]
    if problems:
        raise ConfigError(problems)
    entries = {entry.name: entry for place in reversed(places) for entry in place.entries.values()}
    local = _load(_bundled_local().entries[LOCAL])
    found = [_load(entries[name]) for name in sorted(entries)]
    if LOCAL not in entries and (not found or Path(local.workdir).expanduser().exists()):
        found.append(local)
    return found


def _named(name: str, known: Mapping[str, _Entry], places: list[_Place], chosen_by: str) -> _Entry:
    if name in known:
        return known[name]
    problems = [problem for place in places for problem in place.problems]
    labels = ", ".join(place.label for place in places) or folder_label(Path("hosts"))
    for place in places:
        example = Path(place.label) / f"{name}.example.yaml"
        if os.path.isfile(example):  # noqa: PTH113
            copy = shown(example.with_name(f"{name}.yaml"))
            problems.append(
                Problem(
                    labels,
                    None,
                    f"there is no host '{name}' ({chosen_by}), only an example",
                    f"copy {shown(example)} to {copy} and fill it in",
                )
            )
            raise ConfigError(problems)
    hint = nearest(name, known)
    if hint.startswith("did"):
        hint += f" (known: {', '.join(sorted(known))})"
    if set(known) <= {"local"}:
        hint += f"; a host of yours is a file, here hosts/{name}.yaml"
    raise ConfigError([*problems, Problem(labels, None, f"there is no host '{name}' ({chosen_by})", hint)])


def _places(inventory: Path | None, env: Mapping[str, str]) -> Iterator[_Place]:
    if inventory is not None:
        path = Path(os.path.expanduser(inventory))  # noqa: PTH111 -- an unknown `~user` stays as it is
        # os.path: a name that is too long, or none, is not there either
        if not os.path.exists(path):  # noqa: PTH110
            raise ConfigError.one(str(inventory), None, "there is no such inventory file or folder")
        yield _read(
            folder_label(path) if path.is_dir() else shown(path),
            yaml_files(path) if path.is_dir() else [path],
        )
        return
    for folder in (Path("hosts"), user_config(env) / "hosts"):
        if folder.is_dir():
            yield _read(folder_label(folder), yaml_files(folder))


def _bundled_local() -> _Place:
    folder = bundled("hosts")
    return _read(str(folder), [file for file in yaml_files(folder) if file.stem == LOCAL])


def _read(label: str, files: list[Path]) -> _Place:
    place = _Place(label)
    for file in files:
        try:
            entries = list(_entries(file))
        except ConfigError as error:
            place.problems += error.problems
            continue
        for entry in entries:
            if entry.name in place.entries:
                first = place.entries[entry.name].document
                place.problems.append(
                    entry.document.problem((), f"the host '{entry.name}' stands in two files", f"also in {first.file}")
                )
            else:
                place.entries[entry.name] = entry
    return place


def _entries(file: Path) -> Iterator[_Entry]:
    """The hosts of a file: one host, or several under the key `hosts`."""
    document = read_document(file)
    data = document.data
    if not isinstance(data, dict):
        raise ConfigError([document.problem((), "must be a mapping (key: value lines)")])
    if "hosts" not in data:
        stem = file.stem.removesuffix(".example")
        yield _entry(str(data.get("name", stem)), file, document)
        return
    others = [str(key) for key in data if key != "hosts"]
    if others:
        hint = "each host's keys stand below its name"
        raise ConfigError(document.problem((key,), f"unknown key '{key}' beside 'hosts'", hint) for key in others)
    hosts = data["hosts"]
    if not isinstance(hosts, dict) or not hosts:
        raise ConfigError([document.problem(("hosts",), "'hosts' must be a mapping: a section for each host's name")])
    for name in hosts:
        yield _entry(name, file, document.part(("hosts", name)))


def _entry(name: str, file: Path, document: Document) -> _Entry:
    data = document.data
    named = Document(document.file, {"name": name, **data}, document.lines) if isinstance(data, dict) else document
    return _Entry(name, file.parent, named)


def _load(entry: _Entry) -> Host:
    document = entry.document
    if not isinstance(document.data, dict):
        raise ConfigError([document.problem((), f"the host '{entry.name}' must be a section (key: value lines)")])
    if document.data["name"] != entry.name:
        raise ConfigError(
            [document.problem(("name",), f"this host is called '{entry.name}' already", "leave `name` out")]
        )
    data = _absolute_paths(document.data, entry.folder)
    transport = data.get("transport")
    given = {key for key in ("ssh", "pct") if data.get(key) is not None}
    problems = []
    if transport in ("local", "ssh", "pct"):
        problems = [
            document.problem((section,) if section in given else ("transport",), message)
            for section, message in section_problems(transport, given)
        ]
    return validated(Host, data, lambda path: document, problems)


def _absolute_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Key files and files of secrets relative to the inventory file; `~` stays for whoever knows whose home it is."""
    made = dict(data)
    ssh, secrets, notify = data.get("ssh"), data.get("secrets"), data.get("notify")
    if isinstance(ssh, dict):
        made["ssh"] = {key: _absolute(value, folder) if key in _PATHS else value for key, value in ssh.items()}
    if isinstance(secrets, dict):
        made["secrets"] = {
            name: FILE + _absolute(value.removeprefix(FILE), folder)
            if isinstance(value, str) and value.startswith(FILE)
            else value
            for name, value in secrets.items()
        }
    if isinstance(notify, dict) and str(notify.get("webhook", "")).startswith(FILE):
        made["notify"] = {**notify, "webhook": FILE + _absolute(notify["webhook"].removeprefix(FILE), folder)}
    return made


def _absolute(value: Any, folder: Path) -> Any:
    relative = isinstance(value, str) and value and "\0" not in value and not value.startswith("~")
    return str((folder / value).resolve()) if relative else value
