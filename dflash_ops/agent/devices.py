"""The GPUs of the host, and which of them a workload may use."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Optional, Tuple

from .errors import AgentError, ExitCode
from .workdir import SYSTEM_PATH

CPU = "cpu"
_FIELDS = "index,uuid,name,memory.total,memory.used,driver_version"
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    name: str
    memory_bytes: int
    memory_used_bytes: int

    def to_json(self) -> Dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Inventory:
    """What nvidia-smi says; `problem` is why it could not say (None also where it is not installed)."""

    gpus: Tuple[Gpu, ...] = ()
    driver: Optional[str] = None
    problem: Optional[str] = None


def search_path() -> str:
    return os.environ.get("PATH", "") + ":" + SYSTEM_PATH


def inventory() -> Inventory:
    """Asks nvidia-smi once; a host without it has no GPUs."""
    program = shutil.which("nvidia-smi", path=search_path())
    if program is None:
        return Inventory()
    command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Inventory(problem=f"nvidia-smi: {error}")
    if done.returncode != 0:
        # it says what is wrong on standard output
        return Inventory(problem=f"nvidia-smi: {(done.stdout + done.stderr).strip()[:500]}")
    return _parse(done.stdout)


def _mebibytes(text: str) -> int:
    """Some boards share the host's memory and say [N/A]."""
    return int(text) * _MIB if text.isdigit() else 0


def _parse(text: str) -> Inventory:
    gpus, driver = [], None
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 6 or not fields[0].isdigit():
            return Inventory(problem=f"nvidia-smi said what we do not understand: {line.strip()[:200]}")
        gpus.append(Gpu(int(fields[0]), fields[1], fields[2], _mebibytes(fields[3]), _mebibytes(fields[4])))
        driver = fields[5]
    return Inventory(tuple(gpus), driver)


@dataclass(frozen=True)
class Devices:
    """The GPUs that a job may use, by UUID and in the order asked for; none means the CPU."""

    uuids: Tuple[str, ...]
    driver: Optional[str]

    @property
    def names(self) -> List[str]:
        """What verdicts and leases are bound to: sorted UUIDs, or `["cpu"]`."""
        return sorted(self.uuids) or [CPU]

    @property
    def cuda_visible(self) -> str:
        return ",".join(self.uuids)


def resolve(workload: Dict[str, Any], found: Inventory) -> Devices:
    """The devices of a workload: its `gpus` ("all", or a list of index or UUID) and `require_cuda`."""
    asked = workload.get("gpus", "all")
    if asked == "all":
        uuids = [gpu.uuid for gpu in found.gpus]
    elif isinstance(asked, list):
        uuids = [_one(item, found) for item in asked]
    else:
        raise _unknown(asked, found)
    if len(set(uuids)) != len(uuids):
        raise AgentError(
            "gpus", f"a GPU is named twice in {asked!r}", "workload.gpus", "name each GPU once", ExitCode.BLOCKED
        )
    if workload.get("require_cuda", True) and not uuids:
        because = f" ({found.problem})" if found.problem else ""
        raise AgentError(
            "no_gpu",
            f"the workload needs CUDA and may use no GPU here{because}",
            "workload.require_cuda",
            "run where there is a GPU, or say `require_cuda: false` in the playbook",
            ExitCode.BLOCKED,
        )
    return Devices(tuple(uuids), found.driver)


def _one(item: object, found: Inventory) -> str:
    for gpu in found.gpus:
        if item in (gpu.uuid, gpu.index, str(gpu.index)) and not isinstance(item, bool):
            return gpu.uuid
    raise _unknown(item, found)


def _unknown(item: object, found: Inventory) -> AgentError:
    there = ", ".join(f"{gpu.index} = {gpu.uuid} ({gpu.name})" for gpu in found.gpus) or "no GPU at all"
    return AgentError(
        "gpus",
        f"there is no GPU {item!r}; there is {there}",
        "workload.gpus",
        "name one of these, or say `all`",
        ExitCode.BLOCKED,
        [gpu.to_json() for gpu in found.gpus] or found.problem,
    )
