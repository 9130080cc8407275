"""The account that a job runs as, and what it must be able to reach."""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, Optional, Tuple

from .errors import AgentError, ExitCode

_PASS_THROUGH = 0o711


@dataclass(frozen=True)
class Account:
    """An account of this host that is not the agent's own."""

    name: str
    uid: int
    gid: int
    groups: Tuple[int, ...]
    home: str

    def popen_options(self) -> Dict[str, Any]:
        """What makes subprocess set the child's groups, gid and uid."""
        return {"user": self.uid, "group": self.gid, "extra_groups": list(self.groups)}


def popen_options(account: Optional[Account]) -> Dict[str, Any]:
    return {} if account is None else account.popen_options()


def own_home() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return os.environ.get("HOME", "/")


def find_account(name: Optional[str]) -> Optional[Account]:
    """The account to switch to; None when none was asked for or it is the agent's own."""
    if name is None:
        return None
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise AgentError(
            "user",
            f"there is no account {name!r}",
            "accounts of the host",
            "create it there, or correct `user` in the host's file",
            ExitCode.BLOCKED,
        ) from None
    if entry.pw_uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        raise AgentError(
            "user",
            f"only root may start a job as {name!r}, the agent runs as uid {os.geteuid()}",
            "accounts of the host",
            "log in as root or as that account, or leave `user` out",
            ExitCode.BLOCKED,
        )
    return Account(name, entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(name, entry.pw_gid)), entry.pw_dir)


def _may_enter(folder: Path, account: Account) -> bool:
    status = folder.stat()
    if status.st_uid == account.uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid in account.groups:
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)


def let_through(account: Optional[Account], root: Path, folders: Iterable[Path]) -> None:
    """Makes `folders` (at or below `root`), and those between, enterable by `account`; the rest stays closed.

    What lies above `root` is not ours to change: if the account cannot pass there, that is an error.
    """
    if account is None:
        return
    for above in reversed(root.parents):
        if not _may_enter(above, account):
            raise AgentError(
                "user",
                f"account {account.name!r} cannot enter {above}",
                f"work directory {root}",
                "choose a work directory it can reach, for example /var/lib/dflash-ops",
                ExitCode.BLOCKED,
            )
    for folder in folders:
        for each in (folder, *folder.parents):
            os.chmod(each, _PASS_THROUGH)
            if each == root:
                break


def hand_over(account: Optional[Account], *paths: Path) -> None:
    """Gives files and folders (not what is in them) to the job's account."""
    if account is None:
        return
    for path in paths:
        os.chown(path, account.uid, account.gid)
