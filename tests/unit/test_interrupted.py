"""What Ctrl-C says: what became of what the command was at."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest

from dflash_ops import cli
from dflash_ops.cli.common import command_end
from dflash_ops.deploy.events import Events


@pytest.mark.parametrize(
    ("name", "run", "words"),
    [
        ("deploy", None, "nothing was launched by this command"),
        ("deploy", "one", "that stops no run: `dflash-ops status one`"),
        ("wait", "one", "that stops no run: `dflash-ops status one`"),
        ("prune", None, "interrupted: type it again to go on"),
        ("stop", "one", "its host goes on ending run one: `dflash-ops wait one`"),
        ("stop", None, "before the host had answered: type it again"),
    ],
)
def test_interrupted(name: str, run: str | None, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    @command_end
    def body(*, events: Events, result: dict[str, Any]) -> None:
        if run is not None:
            result["run"] = run
        raise KeyboardInterrupt

    with click.Context(click.Command(name), info_name=name):
        assert body(as_json=False, debug=False) == 130
    assert words in capfd.readouterr().err


def test_interrupted_before_it_began(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(**_: object) -> None:
        raise click.Abort

    monkeypatch.setattr(cli.group, "main", interrupted)
    # main takes SIGTERM for itself
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    monkeypatch.setattr(cli.os, "umask", lambda _: 0)
    with pytest.raises(SystemExit) as ended:
        cli.main(["runs", "--json"])
    assert ended.value.code == 130
    last = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (last["event"], last["exit"]) == ("result", 130)
