"""What runs on a Proxmox node before the container's program: what the node tells of it, and the way in.

All in the same ssh command, without a pct call of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BEGIN, END = "DFLASH-OPS-NODE", "DFLASH-OPS-NODE-END"
KEYS = ("arch", "cores", "features", "hostname", "lock", "memory", "ostype", "swap", "unprivileged")
"""Of a container's configuration. Others may hold what is nobody's business (`lxc.environment`, descriptions)."""

_TELL = (
    f"{{ echo {BEGIN}; uname -n; "
    # snapshots follow in sections of their own
    f'sed -n -E "/^\\[/q; s/^({"|".join(KEYS)}): */conf \\1 /p" "/etc/pve/lxc/$0.conf"; '
    'for file in /etc/pve/nodes/*/lxc/"$0".conf; do [ ! -e "$file" ] || echo "at $file"; done; '
    'dpkg-query -W -f "package \\${Package} \\${Version}\\n" pve-manager pve-container; '
    f"echo {END}; }} </dev/null 2>/dev/null; "
)
NODE_SCRIPT = f'{_TELL}exec "$@"'
"""For `sh -c`, with the container's id and the command that follows. It takes nothing from stdin."""

ATTACH_S = 5
ATTACH_SCRIPT = (
    f'{_TELL}if timeout -k 1 {ATTACH_S} lxc-attach -n "$0" --clear-env -- /bin/true </dev/null >/dev/null 2>&1; '
    'then shift 4; exec lxc-attach -n "$0" --clear-env -- "$@"; fi; exec "$@"'
)
"""The same, where the command is `pct exec ID -- PROGRAM ...`: `pct` only looks whether the container is there and
runs, which takes it most of a second, and then becomes lxc-attach (pve-container 6.1, `src/PVE/CLI/pct.pm`). Where
that can be done without it, it is; else `pct` says in its own words why not (docs/decisions/0029)."""


@dataclass(frozen=True)
class Node:
    name: str
    packages: dict[str, str]
    """Name → version, of Proxmox's own."""
    config: dict[str, str]
    """The container's, as far as KEYS go. Empty where this user may not read it."""
    homes: tuple[str, ...]
    """Names of the nodes of this cluster that have the container. Empty where this user may not look."""


def parse_node(printed: str) -> Node | None:
    """From what was printed before the agent spoke; None where NODE_SCRIPT did not run."""
    lines = printed.splitlines()
    if BEGIN not in lines or END not in lines:
        return None
    name, *rest = lines[lines.index(BEGIN) + 1 : lines.index(END)]
    packages, config, homes = {}, {}, []
    for line in rest:
        kind, _, words = line.partition(" ")
        key, _, value = words.partition(" ")
        if kind == "conf":
            config[key] = value.strip()
        elif kind == "package":
            packages[key] = value
        elif kind == "at" and (found := re.fullmatch(r"/etc/pve/nodes/([^/]+)/lxc/\d+\.conf", words)):
            homes.append(found.group(1))
    return Node(name, packages, config, tuple(homes))
