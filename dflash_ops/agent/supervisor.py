"""`supervise RUN_DIR`: starts a run's job, outlives every client, and has the last word in exit.json."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Union

from . import cgroup
from .accounts import find_account, popen_options
from .children import say
from .disk import free_bytes_near
from .errors import AgentError
from .exits import write_exit
from .files import atomic_write, open_regular, read_json, write_json
from .full_disk import full_disk
from .growth import Growth
from .joblog import JobLog
from .masking import Masks
from .policy import Policy
from .prepared import INCOMPLETE, REPORT, is_whole
from .processes import ProcessId, become_subreaper, boot_id, boottime_s, children_of, signal_group
from .runs import RunFolder, RunState
from .spare import spend_spare
from .watch import NON_FINITE, Trouble, Watch
from .workdir import WorkDir

if TYPE_CHECKING:
    from .notify import Notifier
    from .restart import Restart
    from .retention import Retention
    from .room import Room

_LOOK_S = 0.2
_BEAT_S = 2.0
_CLEAR_TIME_S = 30.0
_DRAIN_TIME_S = 10.0
_STACK_TIME_S = 2.0
_FROZEN_S = 5.0
"""Between two looks there is far less, unless this process was frozen (a container is, while it is backed up)."""


def end_state(
    code: Optional[int], number: Optional[int], stop_asked: bool, oom_kills: int, trouble: Optional[Trouble] = None
) -> RunState:
    """What an ending means; SIGKILL alone is no proof of running out of memory, a counted kill is.

    A run that was ended for its trouble has failed, however politely it went; so has one that did not do its work.
    """
    if trouble is not None:
        return RunState.FAILED
    if code == 0:
        return RunState.SUCCEEDED
    if stop_asked:
        return RunState.STOPPED
    if number == signal.SIGKILL and oom_kills > 0:
        return RunState.OOM
    return RunState.FAILED


class Supervisor:
    """One run, from its start to exit.json. A stop is asked for by stop.json or by SIGTERM to this process."""

    _notifier: "Notifier"
    _retention: "Retention"
    _room: "Room"

    def __init__(self, folder: RunFolder, agent_file: str) -> None:
        self._folder = folder
        self._agent_file = agent_file
        self._record = folder.record()
        self._policy = Policy.of_record(self._record)
        self._secrets: Dict[str, str] = {}
        self._log = JobLog(folder.log, self._policy)
        self._prepares = folder.prepares()
        stall_s, first_s = self._policy.stall_s, self._policy.first_step_s
        self._watch: Union[Watch, Growth] = (
            Watch(folder.metrics, stall_s=stall_s, first_step_s=first_s, last_step=folder.planned_steps())
            if self._prepares is None
            else Growth(self._prepares, stall_s=stall_s, first_s=first_s)
        )
        self._trouble: Optional[Trouble] = None
        self._end_at = 0.0
        self._pid = 0
        self._job: Optional[ProcessId] = None
        self._status: Optional[int] = None
        self._kills_before = 0
        self._kills = 0
        self._stop_seen: Any = None
        self._stop_deadline: Optional[float] = None
        self._terminated = False
        self._forced = False
        self._next_beat = 0.0
        self._looked = time.monotonic()
        self._free: Optional[int] = None

    def run(self) -> None:
        wake = self._listen()
        become_subreaper()
        self._kills_before = cgroup.oom_kills() or 0
        try:
            self._secrets = self._take_secrets()
            self._start()
        except (OSError, AgentError, subprocess.SubprocessError) as error:
            write_exit(self._folder, RunState.FAILED, error=str(error))
            self._attend()
            self._notifier.tell("ended", f"could not start: {error}")
            self._wait_for_notices(wake)
            return
        # whoever launched it waits for the job's start, and for nothing else
        self._beat()
        self._attend()
        while self._status is None:
            self._beat()
            self._look_for_stop()
            self._look_for_trouble()
            self._keep_deadline()
            self._keep_checkpoints(self._retention.tend)
            self._look_at_disk()
            self._sleep(wake)
        # before anything is cleared away
        self._free = free_bytes_near(self._prepares or self._folder.out)
        self._clear()
        self._drain(wake)
        self._look_once_more()
        self._keep_checkpoints(self._retention.finish)
        restart = self._restart(self._folder, self._secrets, self._agent_file)
        self._finish(self._status, restart)
        # told after exit.json, before a restart that may wait for long
        self._notifier.tell("ended", str(((self._folder.ended() or {}).get("reason") or {}).get("what", "")))
        restart.carry_out(lambda: self._stopped_meanwhile(wake))
        self._wait_for_notices(wake)

    def _attend(self) -> None:
        """Gets what a run that goes on needs beside its log."""
        from .notify import Notifier
        from .restart import Restart
        from .retention import Retention
        from .room import Room

        self._notifier = Notifier(self._folder)
        self._retention = Retention(self._folder, self._policy)
        self._room = Room(self._folder, self._warn_of_disk)
        self._restart = Restart

    def _wait_for_notices(self, wake: int) -> None:
        """A unit that ends takes them along. The run has ended, whatever they do."""
        from .notify import LONGEST_S

        until = time.monotonic() + LONGEST_S
        while self._notifier.children and time.monotonic() < until:
            self._sleep(wake)
        for pid in self._notifier.children:
            os.kill(pid, signal.SIGKILL)

    def _stopped_meanwhile(self, wake: int) -> bool:
        """Lives on for a moment after the run's end; whether it got SIGTERM."""
        self._beat()
        self._sleep(wake)
        return self._terminated

    def _sleep(self, wake: int) -> None:
        """A moment, or less if a child ends or a signal comes."""
        if select.select([wake], [], [], _LOOK_S)[0]:
            os.read(wake, 512)
        self._reap()

    def _listen(self) -> int:
        """A file descriptor that becomes readable on SIGCHLD and SIGTERM.

        SIGHUP gets a handler that does nothing: an ignored signal would stay ignored in the job.
        """
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        return reading

    def _on_sigterm(self, *_: object) -> None:
        self._terminated = True

    def _take_secrets(self) -> Dict[str, str]:
        """The job's secrets; from here on they live in this process only."""
        names = self._record.get("secrets") or []
        found = read_json(self._folder.secrets_file) or {}
        self._folder.secrets_file.unlink(missing_ok=True)
        if sorted(found) != names:
            raise OSError(f"the secrets {', '.join(names)} are not there any more")
        return {name: str(value) for name, value in found.items()}

    def _start(self) -> None:
        record = self._record
        self._folder.log.begin()
        self._log.start(Masks.of(self._secrets.values()))
        try:
            process = subprocess.Popen(
                record["command"],
                stdin=subprocess.DEVNULL,
                stdout=self._log.sink,
                stderr=self._log.sink,
                cwd=record["cwd"],
                env={**record["environment"], **self._secrets},
                start_new_session=True,
                **popen_options(find_account(record["user"])),
            )
        finally:
            self._log.job_started()
        # reaped here with everything else, so subprocess must not wait for it
        self._pid, process.returncode = process.pid, 0
        self._job = ProcessId.of(self._pid) or ProcessId(self._pid, -1)

    def _beat(self) -> None:
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + _BEAT_S
        me = ProcessId.of(os.getpid())
        state = {
            "v": 1,
            "boot_id": boot_id(),
            "supervisor": me.to_json() if me else None,
            "job": self._job.to_json() if self._job else None,
            "pump": self._log.pump,
            "beat": boottime_s(),
        }
        # a full disk must not end a run: the next beat may find room
        try:
            write_json(self._folder.state_file, state, durable=False)
        except OSError as error:
            say(f"state.json: {error}")

    def _look_for_stop(self) -> None:
        asked = read_json(self._folder.stop_file)
        if asked is not None and asked != self._stop_seen:
            self._stop_seen = asked
            self._ask_to_stop(float(asked.get("grace_s", self._policy.grace_s)))
        if self._terminated and self._stop_deadline is None:
            self._ask_to_stop(self._policy.grace_s)

    def _ask_to_stop(self, grace_s: float) -> None:
        """SIGTERM to the main process alone: its workers must live until its checkpoint is written."""
        self._stop_deadline = time.monotonic() + grace_s
        os.kill(self._pid, signal.SIGTERM)

    def _look_for_trouble(self) -> None:
        """What is wrong is seen, its stacks asked for, and then it is ended."""
        now = time.monotonic()
        if now - self._looked > _FROZEN_S:
            self._watch.excuse(now - self._looked)
        self._looked = now
        if self._stop_deadline is not None:
            return
        if self._trouble is None:
            self._trouble = self._watch.look()
            if self._trouble is not None:
                self._note_trouble(self._trouble)
                # the contract: SIGUSR1 prints the stack of every thread
                os.kill(self._pid, signal.SIGUSR1)
                self._end_at = time.monotonic() + _STACK_TIME_S
        elif time.monotonic() > self._end_at:
            if self._trouble.kind == NON_FINITE:
                # no SIGTERM: its checkpoint would be the one that the next run begins with
                self._stop_deadline = time.monotonic()
            else:
                self._ask_to_stop(self._policy.grace_s)

    def _note_trouble(self, trouble: Trouble) -> None:
        say(trouble.what)
        with contextlib.suppress(OSError):
            WorkDir(self._folder.root).record(trouble.kind, run=self._folder.run, what=trouble.what, step=trouble.step)
        self._notifier.tell(trouble.kind, trouble.what)

    def _keep_deadline(self) -> None:
        if self._stop_deadline is not None and time.monotonic() > self._stop_deadline and not self._forced:
            self._forced = True
            signal_group(self._pid, signal.SIGKILL)

    def _keep_checkpoints(self, look: Callable[[], None]) -> None:
        self._retention.good_step = self._watch.good_step
        try:
            look()
        except OSError as error:
            # the run is worth more than the room
            say(f"checkpoints: {error}")

    def _look_at_disk(self) -> None:
        try:
            self._room.look()
        except OSError as error:
            say(f"disk: {error}")

    def _warn_of_disk(self, what: str) -> None:
        say(what)
        with contextlib.suppress(OSError):
            WorkDir(self._folder.root).record("disk_low", run=self._folder.run, what=what)
        self._notifier.tell("disk_low", what)

    def _reap(self) -> None:
        """Collects every child that has ended: the job, and orphans of its."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._status = status
                # now: what the kernel kills while we clear away is not what ended the job
                self._kills = (cgroup.oom_kills() or 0) - self._kills_before
            self._log.reaped(pid, status)
            self._notifier.reaped(pid)

    def _clear(self) -> None:
        """Kills what the job left behind, so that the devices are free and the log comes to its end."""
        until = time.monotonic() + _CLEAR_TIME_S
        while time.monotonic() < until:
            # children first, before and after: an orphan comes to us when its parent dies
            ours = {os.getpid(), self._log.pump, *self._notifier.children}
            left = (set(children_of(os.getpid())) | set(self._folder.mark.pids())) - ours
            if not left:
                return
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
            self._reap()

    def _drain(self, wake: int) -> None:
        """All that was written is in the log before the run counts as ended; what cannot be killed may not hold it."""
        for patience_s, hurry in ((_DRAIN_TIME_S, self._log.finish), (_DRAIN_TIME_S, self._log.give_up)):
            until = time.monotonic() + patience_s
            while self._log.pump is not None and time.monotonic() < until:
                self._beat()
                self._sleep(wake)
            if self._log.pump is not None:
                say(f"the log was not at its end after {patience_s:g} s")
                hurry()

    def _finish(self, status: int, restart: Restart) -> None:
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        # a stall does not count where it came to its end after all; a loss that is none does however it ended
        stalled = self._trouble is not None and self._trouble.kind != NON_FINITE
        trouble = None if stalled and code == 0 else self._trouble
        if trouble is not None and trouble.kind == NON_FINITE:
            from .checkpoints import last_finite

            found = last_finite(WorkDir(self._folder.root), self._folder, trouble.good_step)
            trouble = replace(trouble, good_checkpoint=None if found is None else str(found.path))
        if trouble is None and code == 0:
            trouble = self._keep_report()
        state = end_state(code, number, self._stop_deadline is not None, self._kills, trouble)
        facts: Dict[str, Any] = {"oom_kill": self._kills, "forced": self._forced}
        facts["reason"] = self._why(code) if trouble is None and state is RunState.FAILED else None
        if trouble is not None:
            facts["reason"] = trouble.to_json()
        while True:
            try:
                restart.plan(state, code, None if trouble is None else trouble.what)
                write_exit(self._folder, state, code=code, signal=number, **facts)
                return
            except OSError as error:
                # without exit.json the run would count as lost: wait for room, unless some was kept back
                say(f"exit.json: {error}")
                if not spend_spare(self._folder.root):
                    time.sleep(_BEAT_S)

    def _why(self, code: Optional[int]) -> Optional[Dict[str, Any]]:
        """Of a run that failed by itself."""
        place = self._prepares or self._folder.out
        return self._refusal(code) or full_disk(place, self._free, self._folder.log.tail())

    def _refusal(self, code: Optional[int]) -> Optional[Dict[str, Any]]:
        from .refusals import REFUSED, Refusal

        if code != REFUSED:
            return None
        return Refusal.read(
            self._prepares or self._folder.out, self._folder.log.tail(), Masks.of(self._secrets.values())
        ).to_json()

    def _keep_report(self) -> Optional[Trouble]:
        """Puts what the trainer says of the data that it prepared among the run's own files; or what is wrong."""
        if self._prepares is None:
            return None
        if not is_whole(self._prepares):
            return Trouble(INCOMPLETE, f"it ended with exit code 0 and left no whole {REPORT}")
        try:
            with open_regular(self._prepares / REPORT) as file:
                atomic_write(self._folder.out / REPORT, file.read())
        except OSError as error:
            # the data are what counts
            say(f"{REPORT}: {error}")
        return None

    def _look_once_more(self) -> None:
        """What was recorded after the last look counts as well."""
        if self._trouble is None:
            self._trouble = self._watch.sickness()
            if self._trouble is not None:
                self._note_trouble(self._trouble)


def detach() -> None:
    """Double fork: no session, no terminal and no parent that could take this process along."""
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    if os.fork() != 0:
        os._exit(0)


def supervise(path: str, detached: bool) -> int:
    if detached:
        detach()
    folder = RunFolder(Path(path))
    log = os.open(folder.path / "supervisor.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    Supervisor(folder, os.path.abspath(sys.argv[0])).run()
    return 0
