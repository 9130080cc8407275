"""A host: the machine that trains, and the way to it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dflash_ops.agent.variables import FOR_PIP, NAME_PATTERN
from dflash_ops.config.base import NAME, PROGRAM, SECTIONS, TEXT, Matches, Model

TransportName = Literal["local", "ssh", "pct"]

_NEEDED: dict[TransportName, set[str]] = {"local": set(), "ssh": {"ssh"}, "pct": {"ssh", "pct"}}

_PCT = "/usr/sbin/pct"
LOCAL_WORKDIR = "~/.local/share/dflash-ops"
PCT_WORKDIR = "/var/lib/dflash-ops"

# an address or a user is an argument of ssh: it must never look like an option
_ADDRESS = Matches(
    r"[A-Za-z0-9_:\[][A-Za-z0-9._:%\[\]-]*", "a host name, an address or an alias of ssh_config, nothing else"
)
_VARIABLE = Matches(NAME_PATTERN, "a variable's name, and none that dflash-ops sets itself (PATH, DFLASH_OPS_*, ...)")
_PLAIN = Matches(r"[^\x00]*", "text without NUL")
_SECRET = Matches(r"env:[A-Za-z_][A-Za-z0-9_]*|file:[^\x00-\x1f\x7f]+", "env:VARIABLE or file:PATH, of this machine")
_NO_OTHER_KEYS = Field(json_schema_extra={"additionalProperties": False})
_USER = Matches(r"[A-Za-z_][A-Za-z0-9._@-]{0,63}\$?", "a user name")


class Ssh(Model):
    """How the host (for `pct`: the Proxmox node) is reached. ssh_config and ssh-agent are used as usual."""

    address: Annotated[str, _ADDRESS]
    """Host name, IP address or alias of ~/.ssh/config."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Default: ssh_config's, else 22."""
    user: Annotated[str, _USER] | None = None
    """Default: ssh_config's, else yours."""
    identity_file: Annotated[str, TEXT] | None = None
    """Private key file; a relative path is relative to this file. Default: ssh-agent and ssh_config."""
    known_hosts: Annotated[str, TEXT] | None = None
    """Default: ssh_config's, else ~/.ssh/known_hosts."""
    host_key: Literal["strict", "accept-new"] = "strict"
    """strict: the key must be known. accept-new: a new one is printed and kept, a changed one refused."""
    fingerprint: (
        Annotated[str, Matches(r"SHA256:[A-Za-z0-9+/]{43}", "like 'SHA256:' and 43 characters of base64")] | None
    ) = None
    """Pinned host key, as `ssh-keygen -lf` prints it; then known_hosts is not asked."""


class Pct(Model):
    """A Proxmox LXC container on the node that `ssh` reaches."""

    id: Annotated[int, Field(ge=100, le=999_999_999)]
    """Container id, as `pct list` shows it."""
    transfer: Literal["stream", "push"] = "stream"
    """stream: releases ride in the conversation. push: by `pct push` on the node, in pieces that are verified there."""
    become: Literal["none", "sudo"] = "none"
    """How pct gets root on the node: none (the SSH user is root) or sudo (without a password)."""
    command: Annotated[str, PROGRAM] = _PCT
    """pct on the node. With another one than /usr/sbin/pct every way into the container is through it."""

    @property
    def plain(self) -> bool:
        """Whether nothing stands between root of the node and its own pct."""
        return self.become == "none" and self.command == _PCT


class Notify(Model):
    """Either `command` or `webhook`. The event is told as JSON, with a line for people in `text`."""

    command: Annotated[tuple[Annotated[str, _PLAIN], ...], Field(strict=False, min_length=1)] | None = None
    """A program there and its arguments, run as the job's user with the event on its standard input."""
    webhook: Annotated[str, _SECRET] | None = None
    """Where its URL is read here at the launch (env:VARIABLE or file:PATH): the host posts the event to it."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Notify:
        if (self.command is None) == (self.webhook is None):
            raise ValueError("has either 'command' or 'webhook'")
        return self


class Host(Model):
    """One host of the inventory.

    `python` defaults to `python3`; for transport `local` it is the interpreter that runs dflash-ops itself,
    so that `pip install dflash-ops[trainer]` is all that a machine needs. `workdir` defaults to
    `~/.local/share/dflash-ops`, inside a container (`pct`) to `/var/lib/dflash-ops`.
    """

    model_config = ConfigDict(json_schema_extra=lambda schema: schema.update(allOf=_conditions()))

    name: Annotated[str, NAME]
    """Default: the file's name, or the key under `hosts`."""
    transport: TransportName
    """local: this machine. ssh: a machine reached by SSH. pct: a container on a Proxmox node, through SSH."""
    python: Annotated[str, PROGRAM] = "python3"
    """Interpreter there that has the trainer's packages: an absolute path, or a name on PATH."""
    workdir: Annotated[str, Matches(r"(/|~/)[^\x00-\x1f\x7f]*", "an absolute path, or one that begins with ~/")] = (
        LOCAL_WORKDIR
    )
    """Releases, caches and runs live below it, on the host."""
    job_user: Annotated[str, _USER] | None = None
    """The run belongs to this user of the host. Default: the user who logs in."""
    environment: Annotated[dict[Annotated[str, _VARIABLE], Annotated[str, _PLAIN]], _NO_OTHER_KEYS] = Field({})
    """Environment variables of the trainer there; a verdict speaks for these values only. PIP_INDEX_URL and what else
    tells pip where packages are serves the making of an environment, and does not reach the trainer."""
    secrets: Annotated[dict[Annotated[str, _VARIABLE], Annotated[str, _SECRET]], _NO_OTHER_KEYS] = Field({})
    """Variables whose values are read here when they are needed (env:VARIABLE or file:PATH), and shown nowhere."""
    shared_gpus: Annotated[str, TEXT] | None = None
    """Why its GPUs may be used beside programs that are not ours. Default: a GPU whose memory is in use is refused."""
    notify: Notify | None = None
    """Who is told of a run's end, of a stall and of a loss that is not finite, by the host itself."""
    ssh: Ssh | None = None
    """For `ssh` and `pct`."""
    pct: Pct | None = None
    """For `pct`."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_transport(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        made = dict(data)
        if made.get("transport") == "local":
            made.setdefault("python", sys.executable)
        if made.get("transport") == "pct":
            made.setdefault("workdir", PCT_WORKDIR)
        return made

    @model_validator(mode="after")
    def _sections_fit(self) -> Host:
        given = {key for key in ("ssh", "pct") if getattr(self, key) is not None}
        for _, message in section_problems(self.transport, given):
            raise PydanticCustomError(SECTIONS, "{message}", {"message": message})
        return self

    @field_validator("environment")
    @classmethod
    def _no_password(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in sorted(set(environment) & set(FOR_PIP)):
            if re.search(r"://[^/\s]*@", environment[name]):
                raise ValueError(f"has a user name or a password in {name}: make it one of the `secrets`")
        return environment

    @field_validator("secrets")
    @classmethod
    def _not_both(cls, secrets: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        for name in sorted(set(secrets) & set(info.data.get("environment", {}))):
            raise ValueError(f"has {name}, which stands in environment too")
        return secrets


def section_problems(transport: TransportName, given: set[str]) -> Iterator[tuple[str, str]]:
    """The sections that a transport needs or cannot have: (section, what is wrong)."""
    needed = _NEEDED[transport]
    for section in sorted(needed - given):
        yield section, f"transport {transport} needs the section '{section}'"
    for section in sorted(given - needed):
        yield section, f"transport {transport} cannot have the section '{section}'"


def _conditions() -> list[JsonValue]:
    """The same for editors, in JSON Schema."""
    return [
        {
            "if": {"required": ["transport"], "properties": {"transport": {"const": transport}}},
            "then": {
                "required": [*sorted(needed)],
                "properties": {section: False for section in ("pct", "ssh") if section not in needed},
            },
        }
        for transport, needed in _NEEDED.items()
    ]
