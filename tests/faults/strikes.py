"""How each fault strikes, and how the world is set right again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.faults import clock
from tests.faults.cases import FILE, LINK, TYPED, Case, Fault, Place
from tests.faults.link import Harm
from tests.faults.sites import Site
from tests.rig.rig import Rig
from tests.typist import LOOK_S, Command, wait_until

HARM = {Fault.CUT: Harm.CUT, Fault.STALL: Harm.STALL, Fault.DELAY: Harm.DELAY}

FULL_FOR_S = 6.0


@dataclass
class Strike:
    """One fault of a case: `wait_and_strike` is called once its command was typed."""

    case: Case
    site: Site

    def prepare(self) -> None:
        """Before the command is typed."""
        if self.case.fault in LINK and self.case.place.event == TYPED:
            self._set_trap()

    def wait_and_strike(self, command: Command) -> bool:
        """False when the place was never reached, or nothing was there to be hit."""
        place = self.case.place
        if place.event != TYPED and not _until(lambda: self._at(place, command), command):
            return False
        time.sleep(place.pause_s)
        if self.case.fault in LINK:
            if place.event != TYPED:
                self._set_trap()
            assert self.site.link is not None
            return _until(self.site.link.sprung.is_set, command)
        return self._hit(command)

    def _at(self, place: Place, command: Command) -> bool:
        if place.event.startswith(FILE):
            return any(self.site.view().glob(place.event.removeprefix(FILE)))
        return _count(command, place.event) >= place.nth

    def set_right(self) -> None:
        """The link is whole again, and the connections that hung on the broken one end."""
        if self.site.link is not None:
            self.site.link.mend()

    def _set_trap(self) -> None:
        assert self.site.link is not None
        place = self.case.place
        self.site.link.set_trap(HARM[self.case.fault], place.direction, place.bytes)

    def _hit(self, command: Command) -> bool:
        site, fault = self.site, self.case.fault
        if fault is Fault.CLIENT:
            return command.kill()
        if fault is Fault.CLOCK:
            clock.jump(site.clock_folder, self.case.jump_s)
            return True
        if fault is Fault.FULL:
            site.take_room()
            # a supervisor waits for room for its last word, and a follower for that
            command.over.wait(FULL_FOR_S)
            site.give_room()
            return True
        if fault in (Fault.CONTAINER, Fault.SSHD) and not _until(lambda: bool(site.agents()), command):
            return False
        if fault is Fault.CONTAINER:
            assert site.rig is not None
            # it comes up again while the command still tries
            site.rig.stop_container()
            site.rig.start_container()
            return True
        if fault is Fault.SSHD:
            return self._restart_sshd()
        living = {
            Fault.AGENT: site.agents,
            Fault.SUPERVISOR: site.supervisors,
            Fault.PUMP: site.pumps,
            Fault.JOB: site.jobs,
        }[fault]
        hit: list[int] = []
        return _until(lambda: bool(hit) or bool(_kill(living(), hit)), command)

    def _restart_sshd(self) -> bool:
        rig = self.site.rig
        assert rig is not None
        before = _times_up(rig)
        killed = rig.node_run(["pkill", "-KILL", "-f", "sshd: root"])
        # on SIGHUP sshd starts itself again, under the PID that the node's PID 1 waits for
        rig.node_run(["pkill", "-HUP", "-f", r"sshd: .*\[listener\]"], check=True)
        # what is typed next must not meet a port where nobody listens yet
        wait_until(lambda: _times_up(rig) > before, "sshd listens again")
        return killed.returncode == 0


def _times_up(rig: Rig) -> int:
    return rig.sshd_log.read_text(errors="replace").count("Server listening on")


def _kill(pids: list[int], hit: list[int]) -> list[int]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            hit.append(pid)
    return hit


def _until(ready: Callable[[], bool], command: Command) -> bool:
    """True once it is so; False when the command ended before."""
    while not ready():
        if command.over.is_set():
            return ready()
        time.sleep(LOOK_S)
    return True


def _count(command: Command, name: str) -> int:
    """Events of that name; of log lines those of the run."""
    return sum(event["event"] == name and event.get("source", "run") == "run" for event in command.events)


@contextlib.contextmanager
def struck(case: Case, site: Site) -> Iterator[Strike]:
    """Whatever happens inside, the world is right again afterwards."""
    strike = Strike(case, site)
    try:
        yield strike
    finally:
        strike.set_right()
