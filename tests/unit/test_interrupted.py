"""What Ctrl-C says: what became of what the command was at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from dflash_ops import cli
from dflash_ops.cli.common import command_end
from dflash_ops.deploy.events import Events
from tests.commands import listen_to_interrupts

SENDS_ITSELF = """
import os, sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == os.environ["AT_IMPORT_OF"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
sys.meta_path.insert(0, Interrupt())
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A command takes these signals for itself."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def interrupted_status(
    folder: Path, module: str, number: int, *words: str, before: Callable[[], None] = listen_to_interrupts
) -> subprocess.CompletedProcess[str]:
    """`status` that gets the signal when it imports the module. `before`: what whoever starts it does to its signals;
    tests in the background inherit an ignored SIGINT, a person at a terminal does not."""
    (folder / "sitecustomize.py").write_text(SENDS_ITSELF)
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    more = {"PYTHONPATH": path, "AT_IMPORT_OF": module, "SIGNAL": str(int(number)), "HOME": str(folder)}
    (folder / "hosts").mkdir()
    (folder / "hosts" / "box.yaml").write_text("transport: local\n")
    return subprocess.run(
        [sys.executable, "-m", "dflash_ops", "status", "--host", "box", *words],
        cwd=folder,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=before,
    )


@pytest.mark.parametrize(
    ("module", "number", "as_json"),
    [
        ("click", signal.SIGINT, False),
        ("dflash_ops.cli.status", signal.SIGTERM, False),
        ("pydantic", signal.SIGINT, True),
        ("pydantic", signal.SIGHUP, False),
        ("dflash_ops.deploy.session", signal.SIGINT, False),
    ],
)
def test_interrupted_while_it_is_imported(tmp_path: Path, module: str, number: int, as_json: bool) -> None:
    done = interrupted_status(tmp_path, module, number, *(["--json"] if as_json else []))
    assert done.returncode == 130, done.stderr
    if as_json:
        assert [json.loads(line)["event"] for line in done.stdout.splitlines()] == ["notice", "result"]
        assert (json.loads(done.stdout.splitlines()[-1])["exit"], done.stderr) == (130, "")
    else:
        (line,) = done.stderr.splitlines()
        assert line.startswith("note") and "interrupted: type it again" in line
        assert done.stdout == ""


@pytest.mark.parametrize("module", ["click", "dflash_ops.deploy.session"])
def test_under_nohup_a_closed_terminal_is_nothing(tmp_path: Path, module: str) -> None:
    def nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    done = interrupted_status(tmp_path, module, signal.SIGHUP, before=nohup)
    # it came to its own end
    assert done.returncode == 2 and "nothing has run on this host yet" in done.stderr, done.stderr


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
    monkeypatch.setattr(cli.os, "umask", lambda _: 0)
    with pytest.raises(SystemExit) as ended:
        cli.main(["runs", "--json"])
    assert ended.value.code == 130
    last = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (last["event"], last["exit"]) == ("result", 130)
