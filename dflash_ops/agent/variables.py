"""Environment variables that a host's file gives to jobs: plain ones, and secrets, which are neither kept nor shown."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

from .arguments import Arguments
from .errors import AgentError, ExitCode
from .masking import Masks

OURS = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "HOME",
    "LANG",
    "PATH",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
)
"""Set by us for each job, or (PYTHONHOME) sure to break it; so are all that begin with DFLASH_OPS_."""
NAME_PATTERN = rf"(?!(?:{'|'.join(OURS)})$|DFLASH_OPS_)[A-Za-z_][A-Za-z0-9_]*"
FOR_PIP = (
    "PIP_CERT",
    "PIP_CLIENT_CERT",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_INDEX_URL",
    "PIP_PROXY",
    "PIP_RETRIES",
    "PIP_TIMEOUT",
    "PIP_TRUSTED_HOST",
)
"""Where packages are found: for the making of an environment only, no job gets them."""
FOR_BOTH = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE")
"""The network's: pip needs them as a job does (their lower-case names too)."""
MIN_SECRET = 8
MAX_SECRET = 4096

_NAME = re.compile(NAME_PATTERN)


def why_no_secret(value: str) -> Optional[str]:
    """Why `value` cannot be kept secret; None when it can. What is short would mask half of every log."""
    if not MIN_SECRET <= len(value) <= MAX_SECRET:
        return f"it has {len(value)} characters, a secret needs {MIN_SECRET} to {MAX_SECRET}"
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        return "it is more than one line of text"
    return None


@dataclass(frozen=True)
class Variables:
    plain: Dict[str, str] = field(default_factory=dict)
    secrets: Dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def from_arguments(cls, args: Arguments) -> "Variables":
        """From `environment` and `secrets` of a request; AgentError `request` names the variable, never its value."""
        plain, secrets = (_table(args, name) for name in ("environment", "secrets"))
        twice = sorted(set(plain) & set(secrets))
        if twice:
            raise _bad(args, twice[0], "is both plain and secret")
        for name, value in secrets.items():
            why = why_no_secret(value)
            if why is not None:
                raise _bad(args, name, f"cannot be a secret: {why}")
        return cls(plain, secrets)

    @property
    def of_jobs(self) -> "Variables":
        """Those that the trainer gets."""
        return self._those(lambda name: name not in FOR_PIP)

    @property
    def of_pip(self) -> "Variables":
        """Those that the making of an environment gets."""
        return self._those(lambda name: name in FOR_PIP or name.upper() in FOR_BOTH)

    def _those(self, wanted: Callable[[str], bool]) -> "Variables":
        return Variables(
            {name: value for name, value in self.plain.items() if wanted(name)},
            {name: value for name, value in self.secrets.items() if wanted(name)},
        )

    def described(self) -> Dict[str, Optional[str]]:
        """What a verdict is bound to and a person may see: a secret is null here."""
        return {**self.plain, **dict.fromkeys(self.secrets)}

    @property
    def names_of_secrets(self) -> List[str]:
        return sorted(self.secrets)

    @property
    def masks(self) -> Masks:
        return Masks.of(self.secrets.values())


def _table(args: Arguments, table: str) -> Dict[str, str]:
    found: Dict[str, Any] = args.optional_table(table)
    for name, value in found.items():
        if not _NAME.fullmatch(name):
            raise _bad(args, name, "is no name, or one that dflash-ops sets itself")
        if not isinstance(value, str) or "\0" in value:
            raise _bad(args, name, "must be text without NUL")
    return dict(found)


def _bad(args: Arguments, name: str, why: str) -> AgentError:
    return AgentError(
        "request",
        f"the variable {name!r:.80} {why}",
        f"request {args.op}",
        "correct `environment` or `secrets` of the host's file",
        ExitCode.USAGE,
    )
