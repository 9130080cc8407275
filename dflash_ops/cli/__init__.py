"""The command line: one module per command, imported when it is used, so that `--help` answers in a blink."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from dflash_ops import __version__

COMMANDS = {
    "deploy": "Build, check, stage, prove and launch; follow, and bring everything home.",
    "prepare": "Make a playbook's data on the host, in a run of their own.",
    "canary": "Prove the workload on the host; launch nothing.",
    "tail-logs": "Show a run's log, every line once.",
    "wait": "Wait until a run has ended; its end is the exit code.",
    "build": "Build the release here; touch no host.",
    "check": "Syntax and compile-safety rules over the release.",
    "doctor": "What on this host blocks a run, or will hurt later.",
    "status": "One run: state, last step, devices.",
    "stop": "Checkpoint and stop a run; show that nothing is left.",
    "resume": "Go on with a run that has ended, from its last whole checkpoint.",
    "collect": "Bring a run's logs, metrics and checkpoints home.",
    "export": "A checkpoint that is home, as vLLM serves it by its folder alone.",
    "rollback": "Make the last good release current; touch no run.",
    "prune": "Make room on a host: old runs that are home, old releases and data.",
    "unlock": "Who holds the host's lock; take it away.",
    "runs": "The runs on a host, or on all, newest first.",
}


class Commands(click.Group):
    """Loads `dflash_ops/cli/<command>.py` when the command is called; the list above is enough for help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"dflash_ops.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            if near:
                raise click.UsageError(f"{error.format_message()} Did you mean '{near[0]}'?", ctx) from error
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dflash-ops")
def group() -> None:
    """Take a multi-threaded DFlash drafter trainer to a GPU box, prove there that its threads compute the right
    gradients, and only then let the long run start.

    Example: dflash-ops deploy --host ct200 --playbook train

    Exit codes: 0 done, 2 usage or config, 3 build or check refused, 4 cannot reach the host or the transport broke,
    5 doctor found a blocker, 6 canary failed, 7 canary inconclusive, 8 the run failed or could not start,
    9 another deploy holds the host, 10 a time limit for waiting ran out, 130 interrupted.
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with the documented codes only."""
    from dflash_ops.errors import ExitCode, printable

    # what is brought home or written here may quote anything: it is its owner's alone
    os.umask(0o077)
    try:
        code = group.main(args=argv, prog_name="dflash-ops", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        words = printable(error.format_message())
        (
            click.UsageError(words, error.ctx) if isinstance(error, click.UsageError) else click.ClickException(words)
        ).show()
        if "--json" in (sys.argv[1:] if argv is None else argv):
            _tell_programs(error)
        sys.exit(ExitCode.USAGE)
    except (KeyboardInterrupt, click.Abort):
        # before the command itself could see to it: while its modules are read
        _tell_interrupted("--json" in (sys.argv[1:] if argv is None else argv))
        sys.exit(ExitCode.INTERRUPTED)


def _tell_programs(error: click.ClickException) -> None:
    """A program that reads `--json` gets its last line, `result`, also where the command line itself was wrong."""
    from dflash_ops.cli.common import say, usage_error
    from dflash_ops.deploy.events import Events
    from dflash_ops.ui.json_view import json_view

    events = Events(json_view)
    events.emit("result", exit=int(say(events, usage_error(error), debug=False)))


def _tell_interrupted(as_json: bool) -> None:
    from dflash_ops.cli.common import drop_the_output, view_for
    from dflash_ops.deploy.events import Events
    from dflash_ops.errors import ExitCode

    events = Events(view_for(as_json))
    try:
        events.emit("notice", text="interrupted: type it again")
        events.emit("result", exit=int(ExitCode.INTERRUPTED))
    except OSError:
        # whoever listened is gone
        drop_the_output(sys.stderr, sys.stdout)
