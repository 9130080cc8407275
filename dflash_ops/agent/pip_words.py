"""What pip said when it failed, as one error for a person."""

from __future__ import annotations

import re
from typing import Any, Dict, List

from .errors import AgentError, ExitCode

_MISMATCH = re.compile(r"^\s+(\S+) from (.+?)(?: \(from .*)?:$")
_EXPECTED = re.compile(r"Expected (?:or )?(\w+) ([0-9a-f]{64,})")
_GOT = re.compile(r"Got\s+([0-9a-f]{64,})")
_NOT_FOUND = re.compile(r"No matching distribution found for (\S+)")
_OTHER_PYTHON = re.compile(r"require a different python version|requires a different Python")
_NO_WAY = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Failed to resolve|getaddrinfo failed|"
    r"Network is unreachable|No route to host|Connection refused|ConnectTimeoutError|Read timed out|ProxyError|"
    r"Failed to establish a new connection"
)
_REFUSED = re.compile(r"\b(401|403)\b.*(?:Unauthorized|Forbidden|Error)|(?:401|403) Client Error", re.IGNORECASE)
_SHOWN = 40


def explain(lines: List[str], order: Dict[str, Any]) -> AgentError:
    """`lines`: the end of the build's log; `order`: what was to be built (`order.json`)."""
    text = "\n".join(lines)
    evidence = lines[-_SHOWN:]
    what, fix = _reason(lines, text, order)
    kind = "disk_full" if "No space left on device" in text else "environment"
    return AgentError(kind, what, f"environment {str(order['digest'])[:12]}", fix, ExitCode.BLOCKED, evidence)


def _reason(lines: List[str], text: str, order: Dict[str, Any]) -> "tuple[str, str]":
    here = f"Python {order['version']} on {order['platform']}"
    if "No space left on device" in text:
        return (
            "no space left while the environment was made",
            "make room there (dflash-ops prune), or choose another work directory",
        )
    if "DO NOT MATCH THE HASHES" in text:
        return _mismatch(lines), "take the file that the lock was made of, or make the lock anew if this one is right"
    missing = _NOT_FOUND.search(text)
    if _NO_WAY.search(text):
        return (
            f"the host reaches no package index{f' (for {missing[1]})' if missing else ''}",
            "name one that it reaches (PIP_INDEX_URL in the host's `secrets` or `environment`), or bring the wheels: "
            f"{download_command(order)}; then `wheels: {{upload: wheels}}` in the playbook's `environment`",
        )
    if _REFUSED.search(text):
        return (
            "the package index refuses this host (401 or 403)",
            "give the whole URL as the secret PIP_INDEX_URL in the host's `secrets`",
        )
    if missing is not None:
        place = f"the wheel folder {order['wheels']} has" if order["wheels"] else "the index has"
        why = " (some versions want another Python)" if _OTHER_PYTHON.search(text) else ""
        return (
            f"{place} no wheel of {missing[1]} for {here}{why}",
            "make the lock for this Python and platform, or set `python` of the host; what has only a source "
            "distribution must be built into a wheel first: pip wheel",
        )
    errors = [line for line in lines if line.startswith("ERROR:") or "Error:" in line]
    said = (errors or [line for line in lines if line.strip()] or ["nothing was said"])[-1]
    return f"the environment could not be made: {said}", "read its log above"


def _mismatch(lines: List[str]) -> str:
    """`tiny==1.0 (file:///…): the lock says sha256 …, it is …`, for the first of them."""
    told: Dict[str, str] = {}
    for line in lines:
        for name, pattern, group in (("package", _MISMATCH, 1), ("expected", _EXPECTED, 2), ("got", _GOT, 1)):
            found = pattern.search(line)
            if found is not None:
                told.setdefault(name, found[group])
    package = told.get("package", "a package")
    hashes = f": the lock says {told['expected']}, it is {told['got']}" if {"expected", "got"} <= set(told) else ""
    return f"{package} is not what the lock names{hashes}"


def download_command(order: Dict[str, Any]) -> str:
    """To be run where there is a network, on a machine of this platform with this Python."""
    version = ".".join(str(order["version"]).split(".")[:2])
    return (
        f"on a {order['platform']} machine with a network, `python{version} -m pip download --no-deps --require-hashes "
        "--only-binary :all: --dest wheels -r LOCK`"
    )
