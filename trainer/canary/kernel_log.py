"""Xid errors: what the driver writes into the kernel's log when something goes wrong on a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KMSG = Path("/dev/kmsg")
_RECORD_BYTES = 8192
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)\): (\d+)")
HARDWARE = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
"""Of memory, links, the bus and the GPU's own processor (docs.nvidia.com/deploy/xid-errors); the others may be a
program's fault, of any program that ever ran there."""


@dataclass(frozen=True)
class Xid:
    """`pci`: as `pci_address` spells it."""

    pci: str
    number: int


def pci_address(text: str) -> str:
    """`0000:3b:00` of `00000000:3B:00.0` (nvidia-smi) and of `0000:3b:00` (the kernel)."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def hardware_xids(log: Path = KMSG) -> list[Xid] | None:
    """Those since boot, as far as the log goes back; None where it cannot be read, as in most containers."""
    try:
        return [xid for line in _lines(log) for xid in _xids(line) if xid.number in HARDWARE]
    except OSError:
        return None


def _xids(line: str) -> Iterator[Xid]:
    for found in _XID.finditer(line):
        yield Xid(pci_address(found[1]), int(found[2]))


def _lines(log: Path) -> Iterator[str]:
    """One record each; the device gives one with each read, and would wait for the next at its end."""
    descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                block = os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:
                # this record was overwritten meanwhile: the next read gives the oldest that is left
                continue
            if not block:
                return
            yield from block.decode(errors="replace").splitlines()
    finally:
        os.close(descriptor)
