"""The variables of a host's jobs, with the secrets read from this machine at the moment they are needed."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from dflash_ops.agent.variables import MAX_SECRET, Variables, why_no_secret
from dflash_ops.config import Host
from dflash_ops.config.inventory import FILE
from dflash_ops.errors import ExitCode, OpsError


def read_variables(host: Host, env: Mapping[str, str]) -> Variables:
    """Raises OpsError (exit 2) that names the variable and its source, never a value."""
    secrets = {name: _read(name, source, env) for name, source in host.secrets.items()}
    for name, value in host.environment.items():
        told = next((secret for secret in secrets if secrets[secret] in value), None)
        if told is not None:
            # plain values stand in records, verdicts and reports
            raise OpsError(
                f"{name} holds the value of the secret {told}, and plain values are shown and kept",
                exit_code=ExitCode.USAGE,
                kind="secret",
                where="`environment` of the host's file",
                fix=f"make {name} a secret too",
            )
    return Variables(dict(host.environment), secrets)


WEBHOOK = "notify.webhook"


def read_notify(host: Host, env: Mapping[str, str]) -> dict[str, object] | None:
    """What the host is to be told (docs/agent-protocol.md, `launch`). Raises OpsError (exit 2) without the URL."""
    notify = host.notify
    if notify is None:
        return None
    if notify.webhook is None:
        return {"command": list(notify.command or ())}
    url = _read(WEBHOOK, notify.webhook, env)
    if not url.startswith(("http://", "https://")):
        raise _refused(WEBHOOK, notify.webhook, "it is no http or https URL", "give the whole URL there")
    return {"webhook": url}


def _read(name: str, source: str, env: Mapping[str, str]) -> str:
    value = _from_file(name, source) if source.startswith(FILE) else env.get(source.removeprefix("env:"))
    if value is None:
        raise _refused(name, source, "it is not set here", f"export {source.removeprefix('env:')}=...")
    why = why_no_secret(value)
    if why is not None:
        raise _refused(name, source, why, "give it there as one line of text")
    return value


def _from_file(name: str, source: str) -> str:
    path = Path(os.path.expanduser(source.removeprefix(FILE)))  # noqa: PTH111 -- an unknown `~user` stays as it is
    try:
        # a pipe that nobody writes to must not hold the command up
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _refused(name, source, "it is no regular file", "name a file that holds the value alone")
            return file.read(MAX_SECRET + 2).decode().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise _refused(name, source, why, "name a file that holds the value alone") from error


def _refused(name: str, source: str, why: str, fix: str) -> OpsError:
    return OpsError(
        f"the secret {name} cannot be read from {source}: {why}",
        exit_code=ExitCode.USAGE,
        kind="secret",
        where=f"`{'notify' if name == WEBHOOK else 'secrets'}` of the host's file",
        fix=fix,
    )
