"""GPUs that no run of ours leases and that are in use all the same: by their memory, which no container hides.

Inside a container nvidia-smi's table of processes is empty or holds the node's pids, so it can name but never clear.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from .devices import Gpu, Inventory, inventory, search_path
from .errors import AgentError, ExitCode
from .processes import pids
from .workdir import WorkDir

# what a driver or a display holds is far below; a framework that has loaded a model is far above
BUSY_SHARE = 0.05
# the memory of a job that was just killed is given back within moments
_PATIENCE_S = 5.0
_PAUSE_S = 0.5


def _in_use(gpu: Gpu) -> bool:
    return gpu.memory_used_bytes > BUSY_SHARE * gpu.memory_bytes


def occupied(work: WorkDir, found: Inventory, leased: Sequence[str]) -> List[Dict[str, Any]]:
    """The GPUs in use that are not in `leased`: `index`, `uuid`, memory, and in `known` what can be said of by whom."""
    gpus = [gpu for gpu in found.gpus if _in_use(gpu) and gpu.uuid not in leased]
    if not gpus:
        return []
    named = _named_processes()
    return [
        {**gpu.to_json(), "known": [*named.get(gpu.uuid, []), *_runs_of_other_workdirs(work, gpu.uuid)]} for gpu in gpus
    ]


def refuse_if_occupied(work: WorkDir, devices: Sequence[str], reason: Optional[str]) -> None:
    """AgentError `busy` when one of `devices`, which are free of leases, is in use; not where there is a `reason`."""
    until = time.monotonic() + _PATIENCE_S
    while reason is None:
        found = [gpu for gpu in occupied(work, inventory(), ()) if gpu["uuid"] in devices]
        if not found:
            return
        if time.monotonic() > until:
            raise _refusal(found)
        time.sleep(_PAUSE_S)


def _refusal(found: List[Dict[str, Any]]) -> AgentError:
    gib = 1 << 30
    first = found[0]
    used, total = first["memory_used_bytes"] / gib, first["memory_bytes"] / gib
    who = "; ".join(first["known"]) or "nvidia-smi names no process here: inside a container it cannot"
    more = f" (and {len(found) - 1} more GPUs)" if len(found) > 1 else ""
    return AgentError(
        "busy",
        f"GPU {first['index']} ({first['uuid']}) is in use, and by no run of this work directory: "
        f"{used:.1f} of {total:.1f} GiB{more}; {who}",
        "GPUs of the host",
        "see what runs there with `nvidia-smi` (on the node, for a container) and end it, name other GPUs in "
        "`workload.gpus`, or say in the host's file why they are shared: `shared_gpus: REASON`",
        ExitCode.RUN_FAILED,
        found,
    )


def _named_processes() -> Dict[str, List[str]]:
    """UUID to processes, as nvidia-smi tells them."""
    program = shutil.which("nvidia-smi", path=search_path())
    if program is None:
        return {}
    command = [program, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    named: Dict[str, List[str]] = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        uuid, _, rest = line.partition(", ")
        pid, _, rest = rest.partition(", ")
        name, _, used = rest.rpartition(", ")
        if pid.isdigit():
            named.setdefault(uuid, []).append(f"pid {pid} {name} ({used})")
    return named


def _runs_of_other_workdirs(work: WorkDir, uuid: str) -> List[str]:
    """Runs of ours on that GPU that belong to another work directory of this host."""
    found = set()
    for pid in pids():
        try:
            lines = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        values = dict(line.partition("=")[::2] for line in lines)
        run, root = values.get("DFLASH_OPS_RUN"), values.get("DFLASH_OPS_WORKDIR")
        if run and root and root != str(work.root) and uuid in values.get("CUDA_VISIBLE_DEVICES", "").split(","):
            found.add(f"run {run} of the work directory {root}")
    return sorted(found)
