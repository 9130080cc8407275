"""A command of this workstation that is killed, or whose terminal is closed: what it leaves, and what sweeps it."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from dflash_ops.deploy import scratch
from dflash_ops.files import write_bytes
from tests.commands import Desk, listen_to_interrupts


@pytest.fixture
def temporary(desk: Desk, tmp_path: Path) -> Path:
    """The temporary folder of this desk's commands."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    desk.environment["TMPDIR"] = str(folder)
    return folder


def test_what_a_killed_command_built_is_swept_by_the_next_that_builds(desk: Desk, temporary: Path) -> None:
    with desk.started("deploy", "--playbook", "tiny") as killed:
        killed.until_event("built")
        killed.kill(signal.SIGKILL)
        killed.rest()
    (left,) = temporary.iterdir()
    stranger = temporary / "dflash-ops-of-mine"
    stranger.mkdir()
    with desk.started("deploy", "--playbook", "tiny") as living:
        living.until_event("built")
        # the killed one's went, and that of the one which lives stays where another command builds
        (own,) = set(temporary.iterdir()) - {stranger}
        assert own != left
        done = subprocess.run(
            desk.argv("build", "--playbook", "tiny"), cwd=desk.folder, env=desk.env(), capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert set(temporary.iterdir()) == {stranger, own}
        living.kill(signal.SIGHUP)
        assert living.rest()[-1]["exit"] == living.code == 130
    assert set(temporary.iterdir()) == {stranger}


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from dflash_ops import files
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
files.write_bytes(Path(sys.argv[1]), b"half of it")
"""


def test_what_a_killed_command_half_wrote_goes_when_its_file_is_written_again(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(report)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (half,) = tmp_path.iterdir()
    assert half != report
    # of a command that lives, and of another file
    kept = {tmp_path / f".report.md.{os.getppid()}.tmp", half.with_name(half.name.replace("report", "other"))}
    for path in kept:
        path.touch()
    write_bytes(report, b"all of it")
    assert set(tmp_path.iterdir()) == {report, *kept}
    assert report.read_bytes() == b"all of it"


def test_a_folder_is_swept_before_its_owner_has_locked_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    made = []
    first = scratch._open_owner

    def swept_meanwhile(folder: Path) -> int:
        handle = first(folder)
        if not made:
            made.append(folder)
            scratch.sweep()
            assert not folder.exists()
        return handle

    monkeypatch.setattr(scratch, "_open_owner", swept_meanwhile)
    with scratch.scratch_folder() as folder:
        assert folder.is_dir() and folder.parent != made[0]
        scratch.sweep()
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("as_json", [False, True])
def test_a_closed_terminal_ends_a_command_as_a_kill_does(desk: Desk, as_json: bool) -> None:
    ours, theirs = pty.openpty()
    words = ["tail-logs", "-f", "--host", "box", *(["--json"] if as_json else [])]
    process = subprocess.Popen(
        desk.argv(*words), cwd=desk.folder, env=desk.env(), stdin=theirs, stdout=theirs, stderr=theirs,
        preexec_fn=_has_the_terminal,  # noqa: PLW1509 -- no threads here
    )  # fmt: skip
    try:
        os.close(theirs)
        seen = b""
        while b"waiting for the first" not in seen:
            seen += os.read(ours, 4096)
        os.close(ours)
        assert process.wait() == 130
    finally:
        process.kill()
        process.wait()


def _has_the_terminal() -> None:
    listen_to_interrupts()
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
