"""Who holds a host, in words: one line for each part of the agent's answer to `holders`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_ops.deploy.times import utc


def lock_line(lock: Mapping[str, Any]) -> str:
    """`lock` as the agent's `holders` gives it."""
    heard = "" if lock["unheard_s"] is None else f", last heard of {max(0.0, lock['unheard_s']):.0f} s ago"
    lives = {True: "its agent lives", False: "its agent is gone", None: "whether its agent lives is unknown"}
    return (
        f"{lock['owner']} holds this host with `{lock['command']}` since {utc(lock['since'])}{heard}; "
        f"{lives[lock['agent_lives']]}"
    )


def lease_line(lease: Mapping[str, Any]) -> str:
    """`lease` as in the agent's `holders`."""
    devices = "any device (its record is damaged)" if lease["devices"] is None else ", ".join(lease["devices"])
    since = f" since {utc(lease['since'])}" if lease["since"] else ""
    playbook = f" (playbook {lease['playbook']})" if lease["playbook"] else ""
    if lease["state"] == "RUNNING":
        left = ""
    elif lease["pids"]:
        left = f"; it is {lease['state']}, but its processes {lease['pids']} live"
    else:
        left = f"; it is {lease['state']} and about to be started again"
    return f"{lease['kind']} {lease['owner']}{playbook} has {devices}{since}{left}"


def occupied_line(gpu: Mapping[str, Any]) -> str:
    """`gpu` as in the agent's `holders`, `occupied`."""
    gib = 1 << 30
    known = "; ".join(gpu["known"]) or "nvidia-smi names no process there: on a container's node it can"
    return (
        f"GPU {gpu['index']} ({gpu['uuid']}) is in use by no run of ours: "
        f"{gpu['memory_used_bytes'] / gib:.1f} of {gpu['memory_bytes'] / gib:.1f} GiB; {known}"
    )
