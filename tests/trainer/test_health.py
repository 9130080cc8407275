"""The state of GPUs, read from a stand-in nvidia-smi that answers in the forms of real drivers, and from a log."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from trainer.canary.evidence import Check, Outcome
from trainer.canary.health import checks_of
from trainer.canary.kernel_log import Xid, hardware_xids

pytestmark = pytest.mark.torch

GPU = "GPU-5e2a8d3e-0f3b-9c1e-1c1b-1a2b3c4d5e6f"
HEALTHY = {
    "uuid": GPU,
    "gpu_uuid": GPU,
    "pci.bus_id": "00000000:3B:00.0",
    "ecc.errors.uncorrected.volatile.total": "0",
    "retired_pages.pending": "[N/A]",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
    "clocks_event_reasons.hw_slowdown": "Not Active",
    "clocks_event_reasons.hw_thermal_slowdown": "Not Active",
    "clocks_event_reasons.hw_power_brake_slowdown": "Not Active",
    "clocks_event_reasons.sw_thermal_slowdown": "Not Active",
}
# as a real one: an unknown field ends the whole query with code 2, on standard output
STAND_IN = """#!/usr/bin/env python3
import json, pathlib, sys
here = pathlib.Path(__file__).parent
known = json.loads((here / "known.json").read_text())
once = here / "once.json"
asked = next(word for word in sys.argv if word.startswith("--query-")).partition("=")[2].split(",")
assert "--format=csv,noheader,nounits" in sys.argv
for field in asked:
    if field not in known:
        print(f'Field "{field}" is not a valid field to query.\\n')
        sys.exit(2)
if once.exists() and set(json.loads(once.read_text())) & set(asked):
    known.update(json.loads(once.read_text()))
    once.unlink()
print(", ".join(known[field] for field in asked))
"""


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in lies, first on PATH."""
    program = tmp_path / "nvidia-smi"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def says(card: Path, *, without: str = "nothing", **changes: str) -> tuple[Check, Check]:
    """`health` and `xid` of a card that tells this; `__` in a name is a dot."""
    known = {**HEALTHY, **{name.replace("__", "."): value for name, value in changes.items()}}
    known = {name: value for name, value in known.items() if not name.startswith(without)}
    (card / "known.json").write_text(json.dumps(known))
    health, xid = checks_of({0: GPU}, card / "kmsg")
    assert (health.id, xid.id) == ("health", "xid")
    return health, xid


def test_a_healthy_card_passes(card: Path) -> None:
    health, xid = says(card)
    assert health.outcome is Outcome.PASS
    assert health.summary == "cuda:0: ECC, memory repair, throttling as they should be"
    assert health.figures == {"uncorrected_ecc": 0.0}
    assert xid.outcome is Outcome.NOT_CHECKED


@pytest.mark.parametrize(
    ("change", "outcome", "words"),
    [
        ({"ecc__errors__uncorrected__volatile__total": "2"}, Outcome.WARN, "2 uncorrected ECC errors"),
        ({"remapped_rows__pending": "Yes"}, Outcome.WARN, "waits for a reset"),
        ({"remapped_rows__pending": "1"}, Outcome.WARN, "waits for a reset"),
        ({"retired_pages__pending": "Yes"}, Outcome.WARN, "waits for a reset"),
        ({"remapped_rows__failure": "Yes"}, Outcome.FAIL, "beyond repair"),
        ({"clocks_event_reasons__sw_thermal_slowdown": "Active"}, Outcome.WARN, "throttled: sw_thermal_slowdown"),
        ({"clocks_event_reasons__hw_power_brake_slowdown": "Active"}, Outcome.WARN, "hw_power_brake_slowdown"),
    ],
)
def test_what_is_wrong_with_a_card_is_said(card: Path, change: dict[str, str], outcome: Outcome, words: str) -> None:
    health, _ = says(card, **change)
    assert health.outcome is outcome
    assert words in health.summary


def test_clocks_that_change_for_a_moment_are_no_throttling(card: Path) -> None:
    (card / "once.json").write_text(json.dumps({"clocks_event_reasons.hw_slowdown": "Active"}))
    health, _ = says(card)
    assert not (card / "once.json").exists()
    assert health.outcome is Outcome.PASS


def test_what_a_driver_does_not_know_breaks_nothing(card: Path) -> None:
    old = {f"clocks_throttle_reasons__{name}": "Not Active" for name in ("hw_slowdown", "sw_thermal_slowdown")}
    health, _ = says(card, without="clocks_event", **{**old, "clocks_throttle_reasons__sw_thermal_slowdown": "Active"})
    assert (health.outcome, health.summary) == (Outcome.WARN, "cuda:0: it is throttled: sw_thermal_slowdown")
    health, _ = says(card, without="remapped", ecc__errors__uncorrected__volatile__total="[N/A]")
    assert (health.outcome, health.summary) == (Outcome.PASS, "cuda:0: throttling as they should be")
    nothing = {name.replace(".", "__"): "[Not Supported]" for name in HEALTHY if "uuid" not in name}
    health, _ = says(card, **nothing)
    assert health.outcome is Outcome.NOT_CHECKED
    health, _ = says(card, uuid="GPU-another", gpu_uuid="GPU-another")
    assert health.outcome is Outcome.NOT_CHECKED and GPU in health.summary


def test_without_nvidia_smi_nothing_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "nvidia-smi"
    broken.write_text(
        "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert {check.outcome for check in checks_of({0: GPU}, tmp_path / "kmsg")} == {Outcome.NOT_CHECKED}


def test_xids_of_these_cards_and_of_the_hardware_warn(card: Path) -> None:
    log = card / "kmsg"
    other = "6,812,91542388,-;NVRM: Xid (PCI:0000:86:00): 79, GPU has fallen off the bus.\n"
    program = "3,813,91542389,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=python, Ch 00000008, MMU Fault\n"
    log.write_text(other + program)
    assert says(card)[1].outcome is Outcome.PASS
    log.write_text(
        other + program + "3,814,91542390,-;NVRM: Xid (PCI:0000:3b:00): 94, pid='<unknown>', Contained\n" * 2
    )
    _, xid = says(card)
    assert (xid.outcome, xid.figures) == (Outcome.WARN, {"xids": 2})
    assert xid.summary == "Xid 94 on cuda:0 in the kernel's log since boot"
    assert hardware_xids(log) == [Xid("0000:86:00", 79), Xid("0000:3b:00", 94), Xid("0000:3b:00", 94)]
