"""Hosts and playbooks: typed YAML, every problem told with its file, its line and the nearest right thing.

Nothing here touches the network. Names are imported on first use, so that catching
`ConfigError` costs no pydantic import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_ops.config.asset import Asset
    from dflash_ops.config.errors import ConfigError, Problem
    from dflash_ops.config.host import Host, Pct, Ssh
    from dflash_ops.config.inventory import all_hosts, load_host
    from dflash_ops.config.loading import load_playbook
    from dflash_ops.config.places import bundled
    from dflash_ops.config.playbook import Playbook, Run, Trainer
    from dflash_ops.config.training import Training
    from dflash_ops.config.workload import Workload

__all__ = [
    "Asset",
    "ConfigError",
    "Host",
    "Pct",
    "Playbook",
    "Problem",
    "Run",
    "Ssh",
    "Trainer",
    "Training",
    "Workload",
    "all_hosts",
    "bundled",
    "load_host",
    "load_playbook",
]

_HOMES = {
    "Asset": "asset",
    "ConfigError": "errors",
    "Host": "host",
    "Pct": "host",
    "Playbook": "playbook",
    "Problem": "errors",
    "Run": "playbook",
    "Ssh": "host",
    "Trainer": "playbook",
    "Training": "training",
    "Workload": "workload",
    "all_hosts": "inventory",
    "bundled": "places",
    "load_host": "inventory",
    "load_playbook": "loading",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
