"""What every command shares: its options, how it finds host and playbook, and how it ends."""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import click

from dflash_ops.agent.disk import free_bytes_near
from dflash_ops.config import Host, all_hosts, load_host
from dflash_ops.deploy.events import Event, Events
from dflash_ops.deploy.ledger import Ledger
from dflash_ops.deploy.naming import is_run_name, refuse_no_run
from dflash_ops.errors import ExitCode, OpsError
from dflash_ops.files import FULL, NoRoom
from dflash_ops.interrupts import in_the_command, is_hung_up

Function = Callable[..., Any]
LONGEST_SHOWN = 60
LAUNCHERS = ("canary", "deploy", "prepare", "resume")

HOST_OPTIONS = [
    click.option(
        "--host",
        metavar="NAME",
        help="Host in the inventory. Default: the named run's, $DFLASH_OPS_HOST, the last run's, the only one.",
    ),
    click.option(
        "--inventory",
        type=click.Path(path_type=Path),
        help="Inventory file or folder. Default: ./hosts, then the user's configuration folder.",
    ),
]
PLAYBOOK_OPTIONS = [
    click.option(
        "--playbook",
        default="quickstart",
        show_default=True,
        metavar="NAME|FILE",
        help="What to train, and how.",
    ),
    click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change one playbook setting for this command.",
    ),
]
OUTPUT_OPTIONS = [
    click.option(
        "--json", "as_json", is_flag=True, help="Events as NDJSON on standard output; the last is the result."
    ),
    click.option("--debug", is_flag=True, help="Show tracebacks."),
]


class Whole(click.IntRange):
    """A whole number within limits; an error names them."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__(low, high)
        self._low, self._high = low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        # more digits than the limits have are not worth reading
        given = int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else None
        if given is None or not self._low <= given <= self._high:
            shown = text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
            self.fail(f"{shown!r}: a whole number from {self._low} to {self._high} is meant.", param, ctx)
        return given


HERE = click.Path(path_type=Path, resolve_path=True)
"""A path of this workstation: absolute, since events and results tell it to programs that stand elsewhere."""
RUNS_OPTION = click.option(
    "--runs",
    type=click.Path(path_type=Path, resolve_path=True, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Where runs are collected to.",
)


def options(*groups: list[Function]) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return decorate


def view_for(as_json: bool) -> Callable[[Event], None]:
    if as_json:
        from dflash_ops.ui.json_view import json_view

        return json_view

    @functools.cache
    def human() -> Callable[[Event], None]:
        from dflash_ops.ui.human import HumanView

        return HumanView()

    # at the first event: until then a command has better things to do than to import what it is drawn with
    return lambda event: human()(event)  # noqa: PLW0108


def command_end(function: Callable[..., None]) -> Function:
    """Runs a command's body, which gets `events` and fills `result` (what the last event carries); turns every end
    into one error for a person and a documented exit code."""

    @functools.wraps(function)
    def run(as_json: bool, debug: bool, **arguments: Any) -> int:
        in_the_command()
        events = Events(view_for(as_json))
        result: dict[str, Any] = {}
        try:
            try:
                code = _code_of(lambda: function(events=events, result=result, **arguments), events, result, debug)
            finally:
                events.end()
            events.emit("result", exit=int(code), **result)
        except BrokenPipeError:
            # the reader of our output went away (`| head`): there is nobody left to tell
            code = ExitCode.INTERRUPTED
            drop_the_output(sys.stdout)
        except OSError as error:
            if is_hung_up():
                # the terminal was closed, whether or not the signal came through first
                drop_the_output(sys.stderr, sys.stdout)
                return int(ExitCode.INTERRUPTED)
            # with `--json`, standard output itself is what cannot be written
            told = _workstation_error(error, None)
            sys.stderr.write(f"error    {told}\n")
            code = told.exit_code
            drop_the_output(sys.stdout)
        return int(code)

    return run


def _code_of(body: Callable[[], None], events: Events, result: dict[str, Any], debug: bool) -> ExitCode:
    """Raises what output that cannot be written raises."""
    try:
        body()
    except OpsError as error:
        return say(events, error, debug)
    except click.UsageError as error:
        return say(events, usage_error(error), debug)
    except (KeyboardInterrupt, click.Abort):
        command = click.get_current_context().info_name
        events.emit("notice", text=_interrupted(command, result.get("run")))
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as error:
        return say(events, _workstation_error(error, result.get("run")), debug)
    except Exception as error:
        return say(events, _bug(error), debug)
    return ExitCode.DONE


def drop_the_output(*outputs: TextIO) -> None:
    """What is still to be written, at the interpreter's end too, goes nowhere."""
    for output in outputs:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())


def _interrupted(command: str | None, run: str | None) -> str:
    """What became of what the command was at. `run` is that which it launched, looks at, or asked to stop."""
    if command == "stop":
        if run:
            return f"interrupted; its host goes on ending run {run}: `dflash-ops wait {run}`"
        return "interrupted before the host had answered: type it again"
    if run:
        return f"interrupted; that stops no run: `dflash-ops status {run}`, or `dflash-ops tail-logs -f {run}`"
    if command in LAUNCHERS:
        return "interrupted: nothing was launched by this command; type it again to go on"
    return "interrupted: type it again to go on"


def _workstation_error(error: OSError, run: str | None) -> OpsError:
    """Files of this machine: a full disk, a folder that may not be written. `run`: what the command launched, or is
    about."""
    path = None if error.filename is None else Path(os.fsdecode(error.filename))
    what = f"{error.strerror or error}" + (f": {path}" if path else "")
    mend = "mend that"
    if error.errno in FULL and path is not None:
        what += f": {_room(path, error.needed if isinstance(error, NoRoom) else None)}"
        mend = "make room there" + (", or choose another disk with --runs" if _is_of_runs(path) else "")
    command = click.get_current_context().info_name
    if run is not None:
        then = f"then `dflash-ops collect {run}`: what is here is kept, and a run goes on by itself"
    elif command in LAUNCHERS:
        then = "nothing was launched: then run the same command again"
    else:
        then = "then run the same command again"
    return OpsError(
        what, exit_code=ExitCode.BLOCKED, kind="workstation", where="this workstation", fix=f"{mend}; {then}"
    )


def _room(path: Path, needed: int | None) -> str:
    free = free_bytes_near(path.absolute())
    said = f"{'?' if free is None else free} bytes free"
    if needed is None:
        return said
    missing = f", {needed - free} missing" if free is not None and needed > free else ""
    return f"{said}, {needed} needed{missing}"


def _is_of_runs(path: Path) -> bool:
    runs = click.get_current_context().params.get("runs")
    return isinstance(runs, Path) and path.is_relative_to(runs)


def usage_error(error: click.ClickException) -> OpsError:
    return OpsError(error.format_message(), exit_code=ExitCode.USAGE, kind="usage")


def _bug(error: Exception) -> OpsError:
    found = OpsError(
        f"{type(error).__name__}: {error}",
        exit_code=ExitCode.BUG,
        kind="bug",
        where="dflash-ops itself",
        fix="this is a bug: please report it with the output of the same command with --debug",
    )
    found.__cause__ = error
    return found


def say(events: Events, error: OpsError, debug: bool) -> ExitCode:
    """Tells it once; returns the exit code that it asks for."""
    facts = error.as_event()
    facts.pop("event")
    events.emit("error", **facts)
    if debug:
        from dflash_ops.ui.plain import plain

        sys.stderr.write(plain(events.masked("".join(traceback.format_exception(error)))))
    return error.exit_code


def ledger_of(events: Events) -> Ledger:
    return Ledger.at(os.environ, lambda text: events.emit("notice", text=text))


def chosen_host(events: Events, host: str | None, inventory: Path | None, *, run: str | None = None) -> Host:
    """The host, told when it was not named. A `run` that is named is looked for where this workstation knows it:
    commands are offered with it, and the last run may have been elsewhere. Raises ConfigError, and OpsError for a
    `run` that can be no name of one."""
    last, places = None, set()
    if run is not None and not is_run_name(run):
        refuse_no_run(run, (entry.run for entry in ledger_of(events).entries()))
    if host is None:
        ledger = ledger_of(events)
        last = ledger.last_launched()
        places = {entry.host for entry in ledger.entries(run=run)} if run is not None else set()
    found, why = load_host(
        host,
        inventory,
        env=os.environ,
        last_host=last.host if last else None,
        run_host=places.pop() if len(places) == 1 else None,
    )
    if host is None:
        events.emit("chosen", host=found.name, why=why)
    return found


def chosen_hosts(host: str | None, inventory: Path | None) -> list[Host]:
    """The one that is named, or all of the inventory. Raises ConfigError."""
    if host is not None:
        return [load_host(host, inventory, env=os.environ, last_host=None)[0]]
    return all_hosts(inventory, env=os.environ)
