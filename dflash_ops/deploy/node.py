"""The doctor's look at a Proxmox node."""

from __future__ import annotations

from dflash_ops.config import Host
from dflash_ops.deploy.doctor import Diagnosis, Level
from dflash_ops.transport.node import Node, parse_node


def examine_node(host: Host, printed: str) -> list[Diagnosis]:
    """`printed`: what came before the agent spoke. Nothing for a host that is no container."""
    node = parse_node(printed)
    if host.pct is None or node is None:
        return []
    version = next((f", {name} {version}" for name, version in sorted(node.packages.items())), "")
    found = [Diagnosis(Level.OK, "node", f"{node.name}{version}; container {host.pct.id}: {_container(node)}")]
    if "lock" in node.config:
        what = f"container {host.pct.id} is locked ({node.config['lock']})"
        found.append(
            Diagnosis(Level.WARNING, "node", what, "wait until that ends: it may stop or freeze the container")
        )
    return found


def _container(node: Node) -> str:
    config = node.config
    if not config:
        return "its configuration is not readable for this user"
    features = config.get("features", "").split(",")
    return ", ".join(
        [
            f"{config.get('memory', '512')} MiB memory and {config.get('swap', '512')} MiB swap",
            f"{config['cores']} cores" if "cores" in config else "all cores",
            "unprivileged" if config.get("unprivileged") == "1" else "privileged",
            "nesting" if "nesting=1" in features else "no nesting",
        ]
    )
