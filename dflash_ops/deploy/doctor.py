"""Reads a host's facts as a careful person would: what blocks a run, what will hurt later. Facts in, findings out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from dflash_ops.agent.variables import Variables
from dflash_ops.config import Host, Playbook
from dflash_ops.deploy.amounts import number, sized
from dflash_ops.deploy.holder_lines import lease_line, lock_line, occupied_line
from dflash_ops.errors import ExitCode, OpsError

MIN_FREE_BYTES = 256 << 20
LOW_FREE_BYTES = 5 << 30
MIN_FREE_INODES = 2000
FREE_SPACE = "free space (`dflash-ops prune --dry-run` shows what could go)"
MAX_CLOCK_SKEW_S = 60.0
BUSY_GPU_SHARE = 0.05
CACHES = {
    "environments": "environments",
    "assets": "assets",
    "prepared": "prepared data",
    "caches": "compiled kernels and the like",
}
"""What the agent measures, and what people call it."""


class Level(str, Enum):
    OK = "ok"
    WARNING = "warning"
    BLOCKER = "blocker"


@dataclass(frozen=True)
class Diagnosis:
    level: Level
    layer: str
    """workstation, node, container, host, gpu or trainer."""
    what: str
    fix: str = ""

    def as_event(self) -> dict[str, object]:
        return {**asdict(self), "level": self.level.value}


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def examine_host(host: Host, facts: Mapping[str, Any], environment: Mapping[str, Any], now: float) -> list[Diagnosis]:
    """`facts` and `environment` are the agent's answers to `facts` and `probe`."""
    where = "container" if host.transport == "pct" else "host"
    managed, packages = environment.get("managed"), number(len(environment["packages"]), "package")
    python = f"python {environment['version']} at {environment['executable']}, {packages}"
    found = [
        Diagnosis(
            Level.OK,
            where,
            f"{facts['hostname']}: kernel {facts['kernel']}, {facts['cpus']} cpus, "
            f"{_gib(facts['memory_bytes'])} memory, user {facts['user']}, "
            f"{'systemd' if facts['systemd'] else 'no systemd'}",
        ),
        Diagnosis(
            Level.OK,
            where,
            python + (f", environment {managed[:12]}" if managed else ""),
        ),
    ]
    free, inodes = facts["disk_free_bytes"], facts["inodes_free"]
    space = f"{_gib(free)} free in {facts['workdir']}"
    if free < MIN_FREE_BYTES:
        what = f"{space}: a run needs {sized(MIN_FREE_BYTES)}"
        found.append(Diagnosis(Level.BLOCKER, where, what, f"{FREE_SPACE}, or name another `workdir`"))
    elif free < LOW_FREE_BYTES:
        what = f"{space}: checkpoints may fill it"
        found.append(Diagnosis(Level.WARNING, where, what, f"{FREE_SPACE} before a long run"))
    else:
        found.append(Diagnosis(Level.OK, where, space))
    # file systems without inodes of their own (btrfs) report 0 of 0
    if 0 < inodes < MIN_FREE_INODES:
        found.append(
            Diagnosis(Level.BLOCKER, where, f"{inodes} inodes free in {facts['workdir']}", "remove small files")
        )
    skew = float(facts["time"]) - now
    if abs(skew) > MAX_CLOCK_SKEW_S:
        found.append(
            Diagnosis(Level.WARNING, where, f"its clock is {skew:+.0f} s from yours", "check its time service")
        )
    return found


def examine_variables(variables: Variables, who: str) -> list[Diagnosis]:
    """What the host's file adds, to whom; of secrets the names."""
    said = [*(f"{name}={value}" for name, value in sorted(variables.plain.items()))]
    said += [f"{name} (secret)" for name in variables.names_of_secrets]
    return [Diagnosis(Level.OK, "workstation", f"{who} {', '.join(said)}")] if said else []


def examine_notify(environment: Mapping[str, Any]) -> list[Diagnosis]:
    """Whoever walks away relies on it: better known before the run than after it."""
    problem = environment["notify"]
    fix = "put it there, or correct `notify` in the host's file"
    return [] if problem is None else [Diagnosis(Level.BLOCKER, "host", f"notify: {problem}", fix)]


@dataclass(frozen=True)
class DiskNeed:
    """What a run will write, in words; setting `less` makes it less."""

    what: str
    bytes: int
    less: str


def examine_disk(
    host: Host,
    facts: Mapping[str, Any],
    footprint: Mapping[str, Any],
    playbook: Playbook,
    *,
    coming: int = 0,
    prepares: bool = False,
) -> list[Diagnosis]:
    """What the run will need at most, against what is free. `footprint` is the agent's answer of that name; `coming`:
    bytes of assets that are still to be sent; `prepares`: it makes data, and no checkpoints."""
    where = "container" if host.transport == "pct" else "host"
    need = _need_of_data(footprint, playbook) if prepares else _need_of_checkpoints(footprint, playbook)
    if need is None:
        thing = "prepared data of this target take" if prepares else "a checkpoint of this drafter takes"
        found = [Diagnosis(Level.OK, where, f"what {thing} is known after {'a' if prepares else 'its'} first run here")]
    else:
        found = [_judged(where, need, facts, playbook, coming)]
    caches = footprint.get("caches")
    if caches is not None:
        sizes = ", ".join(f"{name} {sized(caches[key])}" for key, name in CACHES.items())
        found.append(Diagnosis(Level.OK, where, f"there already: {sizes}; see `dflash-ops prune --dry-run`"))
    return found


def _need_of_checkpoints(footprint: Mapping[str, Any], playbook: Playbook) -> DiskNeed | None:
    known = footprint["checkpoint"]
    if known is None:
        return None
    count, why = _checkpoints_at_once(playbook)
    what = f"{count} checkpoints at once ({why}), {sized(known['bytes'])} each as those of run {known['run']}"
    return DiskNeed(what, count * known["bytes"], "run.keep_last")


def _need_of_data(footprint: Mapping[str, Any], playbook: Playbook) -> DiskNeed | None:
    known = footprint["prepared"]
    if known is None:
        return None
    # the rows of a dataset are counted by the trainer
    rows = playbook.training.prompt_count if playbook.training.data is None else known["rows"]
    what = f"data of {number(rows, 'row')} to prepare, as {known['path']} ({sized(known['bytes'])} for {known['rows']})"
    return DiskNeed(what, -(-known["bytes"] * rows // known["rows"]), "training.prompt_count")


def _judged(where: str, need: DiskNeed, facts: Mapping[str, Any], playbook: Playbook, coming: int) -> Diagnosis:
    total, free, log = need.bytes + coming, facts["disk_free_bytes"], playbook.run.log_max_bytes
    assets = f", and {sized(coming)} of assets to come" if coming else ""
    text = f"{need.what}{assets}: {sized(total)} of {sized(free)} free"
    if total > free:
        return Diagnosis(Level.BLOCKER, where, text, f"{FREE_SPACE}, or lower {need.less}")
    if total + log > free:
        fix = f"{FREE_SPACE}, or lower run.log_max_bytes"
        return Diagnosis(Level.WARNING, where, f"{text}; with a log of {_gib(log)} it would not fit", fix)
    return Diagnosis(Level.OK, where, text)


def _checkpoints_at_once(playbook: Playbook) -> tuple[int, str]:
    """Those that stay, and the next one, which is whole before another goes."""
    training, run = playbook.training, playbook.run
    every = -(-training.steps // training.checkpoint_every)
    if run.keep_last is None or every <= run.keep_last + run.keep_best:
        return every, "all of the run's"
    return run.keep_last + run.keep_best + 1, f"{run.keep_last} last, {run.keep_best} best, the next"


TRAINER_PACKAGES = ("torch", "transformers", "datasets", "safetensors")


def examine_packages(environment: Mapping[str, Any], playbook: Playbook) -> list[Diagnosis]:
    """What the bundled trainer cannot do without; other trainers are asked by their own check."""
    if not playbook.trainer.is_bundled:
        return []
    missing = [name for name in TRAINER_PACKAGES if name not in environment["packages"]]
    if not missing:
        return [Diagnosis(Level.OK, "trainer", f"torch {environment['packages']['torch']} and the trainer's packages")]
    return [
        Diagnosis(
            Level.BLOCKER,
            "trainer",
            f"{environment['executable']} has no {', '.join(missing)}",
            "add them to what the lock is made of"
            if playbook.environment
            else "install the wheel with its extra `trainer` there, or name the right `python` in the inventory, or "
            "give the playbook an `environment`",
        )
    ]


def examine_tools(environment: Mapping[str, Any], playbook: Playbook) -> list[Diagnosis]:
    """What the bundled trainer compiles its kernels with: Triton and CUDA graphs need C, a CPU needs C++.

    A warning: kernels that were compiled before may be all that is needed, and the canary decides.
    """
    workload, tools = playbook.workload, environment["tools"]
    if not playbook.trainer.is_bundled or workload.strategy == "eager":
        return []
    missing = []
    if workload.require_cuda and tools["c"] is None:
        missing.append(("a C compiler (CC, gcc or clang)", "gcc libc6-dev"))
    if not workload.require_cuda and tools["cxx"] is None:
        missing.append(("a C++ compiler (CXX, g++ or clang++)", "g++"))
    if not tools["headers"]:
        minor = ".".join(environment["version"].split(".")[:2])
        missing.append((f"Python's headers ({tools['include']}/Python.h)", f"python{minor}-dev"))
    if workload.require_cuda and tools["problem"] is not None:
        missing.append((f"what {tools['c']} needs for {tools['include']}/Python.h ({tools['problem']})", "libc6-dev"))
    if not missing:
        compiler = tools["c"] if workload.require_cuda else tools["cxx"]
        return [Diagnosis(Level.OK, "trainer", f"kernels are compiled with {compiler} and {tools['include']}/Python.h")]
    what = " and not ".join(name for name, _ in missing)
    return [
        Diagnosis(
            Level.WARNING,
            "trainer",
            f"strategy {workload.strategy} compiles kernels, and there is not {what}",
            f"there: apt install {' '.join(package for _, package in missing)}; or name yours in the host's "
            "`environment` (CC, CXX), or set workload.strategy=eager",
        )
    ]


def examine_holders(holders: Mapping[str, Any]) -> list[Diagnosis]:
    """Who else holds the host's lock and its devices now: the agent's answer to `holders`."""
    found = []
    if holders["lock"] is not None:
        found.append(Diagnosis(Level.WARNING, "host", lock_line(holders["lock"]), "wait, or see: dflash-ops unlock"))
    for lease in holders["leases"]:
        fix = f"wait, or stop it: dflash-ops stop {lease['owner']}" if lease["kind"] == "run" else "wait for it"
        found.append(Diagnosis(Level.WARNING, "host", lease_line(lease), fix))
    for gpu in holders["occupied"]:
        found.append(Diagnosis(Level.WARNING, "gpu", occupied_line(gpu), "end it, or say `shared_gpus` for this host"))
    return found


def examine_gpus(facts: Mapping[str, Any], playbook: Playbook) -> list[Diagnosis]:
    gpus = facts["gpus"]
    if not gpus:
        if playbook.workload.require_cuda:
            return [
                Diagnosis(
                    Level.BLOCKER,
                    "gpu",
                    "no GPU is visible (nvidia-smi shows none) and the playbook requires CUDA",
                    "pass the GPU into the container, or set `require_cuda: false` to train on the CPU",
                )
            ]
        return [Diagnosis(Level.OK, "gpu", "no GPU; the playbook does not require one")]
    found = [Diagnosis(Level.OK, "gpu", f"driver {facts['driver']}, {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}")]
    for gpu in gpus:
        share = gpu["memory_used_bytes"] / max(1, gpu["memory_bytes"])
        text = f"{gpu['index']}: {gpu['name']}, {_gib(gpu['memory_bytes'])}, {gpu['uuid']}"
        if share > BUSY_GPU_SHARE:
            found.append(
                Diagnosis(
                    Level.WARNING,
                    "gpu",
                    f"{text}: {_gib(gpu['memory_used_bytes'])} are in use",
                    "see what runs there: `nvidia-smi` on the node (a container does not see others' processes)",
                )
            )
        else:
            found.append(Diagnosis(Level.OK, "gpu", text))
    return found


def examine_trainer(answer: Mapping[str, Any]) -> list[Diagnosis]:
    """`answer` is the trainer's check.json."""
    problems, warnings = _told(answer, "problems", Level.BLOCKER), _told(answer, "warnings", Level.WARNING)
    if not problems and answer.get("outcome") != "ok":
        problems = [Diagnosis(Level.BLOCKER, "trainer", "the trainer refuses these settings and gives no reason")]
    return [*(problems or [Diagnosis(Level.OK, "trainer", "the trainer accepts these settings")]), *warnings]


def _told(answer: Mapping[str, Any], key: str, level: Level) -> list[Diagnosis]:
    """Each once."""
    found = [
        Diagnosis(level, "trainer", f"{one['where']}: {one['what']}", str(one.get("fix", "")))
        for one in answer.get(key, [])
    ]
    return list(dict.fromkeys(found))


def refuse_blockers(found: list[Diagnosis], where: str) -> None:
    """Raises OpsError (exit 5) that tells every blocker."""
    blockers = [one for one in found if one.level is Level.BLOCKER]
    if blockers:
        first = blockers[0]
        more = f" (and {len(blockers) - 1} more)" if len(blockers) > 1 else ""
        raise OpsError(
            f"{first.what}{more}",
            exit_code=ExitCode.BLOCKED,
            kind="doctor",
            where=f"{where}, {first.layer}",
            fix=first.fix,
        )


def clock() -> float:
    return time.time()
