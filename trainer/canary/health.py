"""The state of the GPUs as the driver tells it: memory errors, repairs that wait for a reset, throttling, Xid errors.

Nothing here is wrong numbers: a GPU whose memory can no longer be repaired fails, all else is shown as a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from trainer.canary.evidence import Check, Evidence, Outcome
from trainer.canary.kernel_log import KMSG, hardware_xids, pci_address
from trainer.canary.nvidia_smi import Facts, query
from trainer.machine import uuid_of

_ECC = "ecc.errors.uncorrected.volatile.total"
_RETIRED = "retired_pages.pending"
_PENDING, _FAILURE = "remapped_rows.pending", "remapped_rows.failure"
_BUS = "pci.bus_id"
# the second spelling is that of drivers before 535
_REASONS = {
    name: (f"clocks_event_reasons.{name}", f"clocks_throttle_reasons.{name}")
    for name in ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
}
_YES = ("yes", "1", "active")


def judge_health(devices: Sequence[torch.device], evidence: Evidence, *, kernel_log: Path = KMSG) -> None:
    """Add `health` for each GPU of `devices`, and `xid`; best called right after they have worked."""
    gpus = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    if not gpus:
        for name in ("health", "xid"):
            evidence.add(Check(name, None, Outcome.NOT_CHECKED, "no worker is on CUDA"))
        return
    uuids = {index: uuid_of(torch.device("cuda", index)) for index in gpus}
    for check in checks_of(uuids, kernel_log):
        evidence.add(check)


def checks_of(uuids: Mapping[int, str], kernel_log: Path) -> list[Check]:
    """`uuids` by CUDA device index."""
    throttles = [spelling for pair in _REASONS.values() for spelling in pair]
    facts = query([_BUS, _ECC, _RETIRED, *throttles])
    if facts is None:
        why = "nvidia-smi is not there, or says nothing"
        return [Check(name, None, Outcome.NOT_CHECKED, why) for name in ("health", "xid")]
    # the clocks change for a moment whenever load begins or ends: what counts is still so in a second look
    again = query(throttles) if any(_throttled(each) for each in facts.values()) else None
    rows = query([_PENDING, _FAILURE], what="remapped-rows", uuid="gpu_uuid") or {}
    found = [_of_gpu(index, uuid, facts, again, rows) for index, uuid in uuids.items()]
    return [*found, _xid({index: facts.get(uuid, {}) for index, uuid in uuids.items()}, kernel_log)]


def _of_gpu(index: int, uuid: str, facts: Facts, again: Facts | None, rows: Facts) -> Check:
    told = facts.get(uuid)
    if told is None:
        return Check("health", None, Outcome.NOT_CHECKED, f"nvidia-smi does not list cuda:{index} ({uuid})")
    bad, worrying, known = [], [], []
    errors = told.get(_ECC, "")
    if errors.isdigit():
        known.append("ECC")
        if int(errors):
            worrying.append(f"{errors} uncorrected ECC errors since its driver was loaded")
    repairs = {**told, **rows.get(uuid, {})}
    if any(name in repairs for name in (_RETIRED, _PENDING, _FAILURE)):
        known.append("memory repair")
    if _is_set(repairs.get(_FAILURE)):
        bad.append("its memory has failed beyond repair (row remapping): replace it")
    elif _is_set(repairs.get(_PENDING)) or _is_set(repairs.get(_RETIRED)):
        worrying.append("a repair of its memory waits for a reset of the GPU")
    if any(spelling in told for pair in _REASONS.values() for spelling in pair):
        known.append("throttling")
        still = _throttled(told) & _throttled((again or {}).get(uuid, {}))
        if still:
            worrying.append(f"it is throttled: {', '.join(sorted(still))}")
    if not known:
        return Check("health", None, Outcome.NOT_CHECKED, f"cuda:{index}: nvidia-smi tells nothing of its state")
    outcome = Outcome.FAIL if bad else Outcome.WARN if worrying else Outcome.PASS
    summary = "; ".join([*bad, *worrying]) or f"{', '.join(known)} as they should be"
    figures = {"uncorrected_ecc": float(errors)} if errors.isdigit() else {}
    return Check("health", None, outcome, f"cuda:{index}: {summary}", figures)


def _throttled(told: Mapping[str, str]) -> set[str]:
    return {name for name, pair in _REASONS.items() if any(_is_set(told.get(spelling)) for spelling in pair)}


def _is_set(value: str | None) -> bool:
    return value is not None and value.lower() in _YES


def _xid(told: Mapping[int, Mapping[str, str]], kernel_log: Path) -> Check:
    found = hardware_xids(kernel_log)
    if found is None:
        return Check("xid", None, Outcome.NOT_CHECKED, f"{kernel_log} cannot be read here")
    places = {pci_address(facts[_BUS]): index for index, facts in told.items() if _BUS in facts}
    mine = [(places[xid.pci], xid.number) for xid in found if xid.pci in places]
    if not mine:
        return Check("xid", None, Outcome.PASS, "no Xid of the hardware in the kernel's log")
    said = ", ".join(f"Xid {number} on cuda:{index}" for index, number in dict.fromkeys(mine))
    return Check("xid", None, Outcome.WARN, f"{said} in the kernel's log since boot", {"xids": len(mine)})
