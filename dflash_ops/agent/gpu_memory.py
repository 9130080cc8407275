"""Whether the memory of a run's GPUs is free again: compared with what was in use right before its launch."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .devices import CPU, Inventory, inventory
from .occupied import occupied
from .workdir import WorkDir

PATIENCE_S = 10.0
"""The driver gives the memory of a killed process back within moments."""
_PAUSE_S = 0.3
_SLACK_BYTES = 64 << 20
"""What a driver's own use may differ by."""


@dataclass(frozen=True)
class Left:
    """One GPU after its run. `used_bytes` and `freed` are None where nvidia-smi did not say."""

    uuid: str
    before_bytes: int
    used_bytes: Optional[int]
    freed: Optional[bool]
    known: Tuple[str, ...] = ()

    def to_json(self) -> Dict[str, Any]:
        return {**asdict(self), "known": list(self.known), "what": self.what}

    @property
    def what(self) -> str:
        if self.used_bytes is None:
            return f"{self.uuid}: not checked, nvidia-smi does not say how much of its memory is in use"
        used = f"{self.uuid}: {self.used_bytes >> 20} MiB in use, {self.before_bytes >> 20} MiB before the launch"
        if self.freed:
            return used
        whose = "; ".join(self.known) or "nvidia-smi names nobody: inside a container it cannot, on its node it can"
        return f"{used}: another program began meanwhile, or one of the run's is still there unseen ({whose})"


def in_use(devices: Sequence[str]) -> Optional[Dict[str, int]]:
    """Bytes in use by UUID, to be kept until the run has ended; None for a run without GPUs."""
    return None if list(devices) == [CPU] else _used(inventory(), devices)


def _used(found: Inventory, devices: Sequence[str]) -> Dict[str, int]:
    return {gpu.uuid: gpu.memory_used_bytes for gpu in found.gpus if gpu.uuid in devices}


def after(work: WorkDir, before: Optional[Dict[str, int]]) -> Optional[List[Left]]:
    """What is in use once the run's processes are gone, waiting a moment; None where nothing can be claimed."""
    if not before:
        return None
    until = time.monotonic() + PATIENCE_S
    while True:
        found = inventory()
        used = _used(found, list(before))
        above = [uuid for uuid in used if used[uuid] > before[uuid] + _SLACK_BYTES]
        if not above or time.monotonic() > until:
            break
        time.sleep(_PAUSE_S)
    known = {one["uuid"]: tuple(one["known"]) for one in occupied(work, found, ())} if above else {}
    return [
        Left(uuid, bytes_, used.get(uuid), uuid not in above if uuid in used else None, known.get(uuid, ()))
        for uuid, bytes_ in sorted(before.items())
    ]
