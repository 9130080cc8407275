"""One case of a measurement of steps, in a process of its own: replicas, a thread each, on one or more GPUs.

Prints one JSON object last. Several cases may run at once: they build side by side, and each has the machine for itself
while it is timed (a lock on the file `LOCK`).
"""

from __future__ import annotations

import dataclasses
import faulthandler
import fcntl
import json
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from overlapped import AsIfOverlapped
from step_models import Drafter, LaunchBound, Trained

from trainer.abort import Abort
from trainer.compile import Gate, own_device, steady_phase
from trainer.nccl_exchange import exchange_between

WINDOWS = 6


@dataclass(frozen=True)
class Case:
    """`replicas` are dealt out to `gpus`; with `exchange` they sum their gradients each step.

    `width` and `layers` are the launch-bound model's, `rows` (samples a step) the drafter's. `profile`: the kernels'
    own times as well (one replica). `master_weights`, `linear_precision` (the drafter's): as in a workload; strategy
    `seed` never has masters.
    """

    strategy: str
    model: str = "launch-bound"
    width: int = 512
    layers: int = 5
    rows: int = 1
    replicas: int = 1
    gpus: int = 1
    exchange: bool = False
    overlapped: bool = False
    steps: int = 200
    profile: bool = False
    master_weights: str = "float32"
    linear_precision: str = "dtype"


class Run:
    """All threads of a case."""

    def __init__(self, case: Case) -> None:
        self._case = case
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self._devices = [
            torch.device(kind, index % case.gpus) if kind == "cuda" else torch.device(kind)
            for index in range(case.replicas)
        ]
        self._abort = Abort()
        self._exchange = (AsIfOverlapped if case.overlapped else exchange_between)(self._devices, self._abort)
        self._together = threading.Barrier(case.replicas)
        self._abort.subscribe(self._together.abort)
        self._found: list[dict[str, Any]] = [{} for _ in range(case.replicas)]
        self._peaks: dict[str, list[float]] = {}

    def run(self) -> dict[str, Any]:
        """The case's figures. `share_of_tolerance` above 1 is a wrong gradient."""
        case = self._case
        with open(os.environ["LOCK"], "w") as lock, steady_phase() as begin:
            fcntl.flock(lock, fcntl.LOCK_SH)

            def opened() -> None:
                begin()
                self._exchange.open()
                fcntl.flock(lock, fcntl.LOCK_EX)

            gate = Gate(case.replicas, self._abort, on_open=opened)
            threads = [
                threading.Thread(target=self._guarded, args=(index, gate), name=f"replica-{index}", daemon=True)
                for index in range(case.replicas)
            ]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        if self._abort.failure is not None:
            raise self._abort.failure
        slowest = max(each["seconds"] for each in self._found)
        worst = max((each["judged"] for each in self._found), key=lambda each: each.share)
        return {
            "ms_a_step": 1e3 * slowest / case.steps,
            "steps_a_second_all": case.replicas * case.steps / slowest,
            "warm_up_s": [round(each["warm_up_s"], 2) for each in self._found],
            "share_of_tolerance": worst.share,
            "worst": worst.what,
            "right": worst.share <= 1,
            **{key: value for key, value in self._found[0].items() if key.endswith(("_ms", "flops"))},
            **self._peaks,
        }

    def _guarded(self, index: int, gate: Gate) -> None:
        try:
            torch.set_num_threads(1)
            with own_device(self._devices[index]):
                self._work(index, gate)
        except BaseException as error:
            self._abort.fail(threading.current_thread().name, error)

    def _build(self, index: int) -> Trained:
        case, device = self._case, self._devices[index]
        replicas, masters = case.replicas if case.exchange else 1, case.master_weights == "float32"
        if case.model == "launch-bound":
            return LaunchBound(
                case.strategy, case.width, case.layers, index, replicas=replicas, masters=masters, device=device
            )
        return Drafter(
            case.model,
            case.strategy,
            index,
            rows=case.rows,
            replicas=replicas,
            masters=masters,
            narrow=case.linear_precision == "fp8",
            device=device,
        )

    def _work(self, index: int, gate: Gate) -> None:
        case, found = self._case, self._found[index]
        started = time.monotonic()
        with gate.exclusive(f"replica-{index}"):
            trained = self._build(index)
            found["warm_up_s"] = time.monotonic() - started
        gate.pass_through()
        windows = []
        for window in range(WINDOWS):
            self._together.wait()
            began = time.perf_counter()
            for number in range(case.steps):
                self._step(index, trained, number)
            self._wait(index)
            if window:  # the first is a warm-up
                windows.append(time.perf_counter() - began)
        found["seconds"] = statistics.median(windows)
        if case.exchange and not case.overlapped and self._devices[index].type == "cuda":
            found["exchange_ms"] = self._exchange_time(index, trained)
        if case.profile:
            found["flops"] = trained.flops
            found["matrix_flops"] = self._matrix_rate(index)
            found["kernel_ms"] = self._kernels(index, trained)
            found["kernels_ms"] = sum(found["kernel_ms"].values())
        if self._together.wait() == 0:
            self._peaks = _memory(self._devices)
        # what the reference takes is no part of a step's memory
        self._together.wait()
        found["judged"] = trained.judged()

    def _step(self, index: int, trained: Trained, number: int) -> None:
        trained.accumulate(number)
        if self._case.exchange:
            self._exchange.gradients(index, trained.gradients)
        trained.update()

    def _wait(self, index: int) -> None:
        device = self._devices[index]
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _exchange_time(self, index: int, trained: Trained, steps: int = 20) -> float:
        """Median ms between the end of the backward and the end of the exchange, on this replica's stream."""
        times = []
        for number in range(steps):
            trained.accumulate(number)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            self._exchange.gradients(index, trained.gradients)
            after.record()
            trained.update()
            times.append((before, after))
        self._wait(index)
        return statistics.median(before.elapsed_time(after) for before, after in times)

    def _kernels(self, index: int, trained: Trained, steps: int = 20) -> dict[str, float]:
        """Each kernel's own time, ms a step, the longest first."""
        if self._devices[index].type != "cuda":
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for number in range(steps):
                self._step(index, trained, number)
            self._wait(index)
        found = {each.key: each.self_device_time_total / 1e3 / steps for each in profile.key_averages()}
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def _matrix_rate(self, index: int, size: int = 8192, times: int = 30) -> float:
        """FLOP/s of one large product in bfloat16, as the device is now."""
        device = self._devices[index]
        if device.type != "cuda":
            return 0.0
        left, right = (torch.randn((size, size), device=device, dtype=torch.bfloat16) for _ in range(2))
        for _ in range(5):
            torch.mm(left, right)
        self._wait(index)
        started = time.perf_counter()
        for _ in range(times):
            torch.mm(left, right)
        self._wait(index)
        return times * 2 * size**3 / (time.perf_counter() - started)


def _memory(devices: list[torch.device]) -> dict[str, list[float]]:
    cuda = [each for each in dict.fromkeys(devices) if each.type == "cuda"]
    if not cuda:
        return {}
    return {
        "peak_allocated_mib": [torch.cuda.max_memory_allocated(each) / 2**20 for each in cuda],
        "peak_reserved_mib": [torch.cuda.max_memory_reserved(each) / 2**20 for each in cuda],
    }


def main() -> None:
    """Reads the case from the only argument."""
    faulthandler.enable()
    case = Case(**json.loads(sys.argv[1]))
    print(json.dumps({"case": dataclasses.asdict(case), **Run(case).run()}), flush=True)


if __name__ == "__main__":
    main()
