"""A host in foreign hands: what it says may stop a command, and writes nothing outside `runs/<run>/` here."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.cli import main
from tests.commands import Ended

RUN = "20260101-000000-tiny-abcd"
TRICKS = "\x1b]0;pwned\x07\x1b[2J[bold]\r\u202e"
STATUS = {
    "run": RUN,
    "state": "SUCCEEDED",
    "release": "0" * 64,
    "started": 1.0,
    "ended": 2.0,
    "exit": None,
    "pid": None,
    "unit": None,
    "user": None,
    "devices": ["cpu"],
    "playbook": "tiny",
    "skipped_canary": None,
    "last": None,
    "evidence": None,
    "cursors": {},
    "parent": None,
    "next": None,
}
Type = Callable[..., Ended]


@pytest.fixture
def lies(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Type:
    """Types a command on a workstation whose host answers with `lies`."""
    python = tmp_path / "host" / "python"
    python.parent.mkdir()
    source = (Path(__file__).parents[1] / "lying_host.py").read_text()
    python.write_text(f"#!{sys.executable} -I\n{source}")
    python.chmod(0o755)
    desk = tmp_path / "desk"
    (desk / "hosts").mkdir(parents=True)
    (desk / "hosts" / "box.yaml").write_text(f"transport: local\npython: {python}\nworkdir: {tmp_path}/nowhere\n")
    monkeypatch.chdir(desk)
    monkeypatch.setenv("HOME", str(desk))

    before = os.umask(0)
    request.addfinalizer(lambda: os.umask(before))

    def type_(*words: str, **lies: Any) -> Ended:
        (python.parent / "lies.json").write_text(json.dumps({"facts": {"result": {}}, **lies}))
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*words, "--host", "box"])
        return Ended(int(ended.value.code or 0), *capfd.readouterr())

    return type_


def written(folder: Path) -> set[str]:
    """Files outside `runs/`, the inventory and the lying host left out."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return {path for path in found if not path.startswith(("host/", "desk/hosts/", "desk/runs/"))}


def controls(text: str) -> set[str]:
    return {letter for letter in text if ord(letter) < 32 or 127 <= ord(letter) < 160 or letter == "\u202e"} - {"\n"}


@pytest.mark.parametrize(
    "path",
    [
        "../../evil",
        "/tmp/dflash-ops-evil",
        "out/checkpoints/../../../evil/manifest.json",
        "out/checkpoints/step-000001/../../../../../evil",
        "..",
        "",
        ".",
        "log/\0",
        "log/" + "x" * 5000,
        "log/" + "x/" * 2000 + "y",
        "-rf $(touch evil) `touch evil`;touch evil",
        "out/\ud800",
    ],
)
def test_a_listing_names_files_of_the_run_or_nothing(lies: Type, tmp_path: Path, path: str) -> None:
    entry = {"path": path, "size": 1, "sha256": "0" * 64, "role": "record", "checkpoint": None}
    files = {"state": "SUCCEEDED", "files": [entry], "checkpoints": []}
    done = lies("collect", "--json", status={"result": STATUS}, files={"result": files}, read={"result": {}})
    assert done.code != 0
    assert done.result["exit"] == done.code
    assert written(tmp_path) == set()
    assert not Path("/tmp/dflash-ops-evil").exists()


@pytest.mark.parametrize("name", ["../../evil", "/tmp/dflash-ops-evil", "..", "", "a/b", "a\0b", "-x", "x" * 300])
def test_a_run_is_called_by_a_name_or_refused(lies: Type, tmp_path: Path, name: str) -> None:
    files = {"state": "SUCCEEDED", "files": [], "checkpoints": []}
    done = lies("collect", "--json", status={"result": {**STATUS, "run": name}}, files={"result": files})
    assert (done.code, done.error["kind"]) == (4, "protocol")
    assert written(tmp_path) == set()
    assert not Path("runs").exists()


def test_a_link_in_the_way_is_not_followed_out_of_the_run(lies: Type, tmp_path: Path) -> None:
    """The host cannot make one here; what a person or another program left is replaced, never written through."""
    outside = tmp_path / "desk" / "precious"
    outside.write_text("mine")
    folder = Path("runs") / RUN
    folder.mkdir(parents=True)
    (folder / "run.json").symlink_to(outside)
    data = b"theirs"
    entry = {"path": "run.json", "size": 6, "sha256": "0" * 64, "role": "record", "checkpoint": None}
    lies(
        "collect",
        "--json",
        status={"result": STATUS},
        files={"result": {"state": "SUCCEEDED", "files": [entry], "checkpoints": []}},
        read={"data": base64.b64encode(data).decode(), "result": {"size": 6, "sha256": "0" * 64}},
    )
    assert outside.read_text() == "mine"


def test_what_is_shown_does_nothing_to_the_terminal(lies: Type) -> None:
    tricky = {**STATUS, "state": TRICKS, "devices": [TRICKS], "playbook": TRICKS, "skipped_canary": TRICKS}
    error = {"kind": TRICKS, "what": TRICKS, "where": TRICKS, "fix": TRICKS, "exit": 8, "evidence": [TRICKS]}
    for words, answers in (
        (["status"], {"status": {"result": tricky}}),
        (["runs"], {"runs": {"result": {"runs": [tricky]}}}),
        (["status", "--debug"], {"status": {"error": error}}),
    ):
        done = lies(*words, **answers)
        assert "[bold]" in done.err
        assert controls(done.out + done.err) == set()


def test_a_log_is_shown_harmless_and_told_to_programs_as_it_is(lies: Type) -> None:
    line = f"loss {TRICKS}1".replace("\r", "\t")
    data = base64.b64encode(f"{line}\n".encode()).decode()
    answers = {"runs": {"result": {"runs": [STATUS]}}, "follow": {"data": data, "result": STATUS}}
    shown = lies("tail-logs", **answers)
    assert shown.code == 0
    assert shown.out == "loss \\x1b]0;pwned\\x07[bold]\t\\u202e1\n"
    told = lies("tail-logs", "--json", **answers)
    assert "\x1b" not in told.out
    assert told.log == [line]


@pytest.mark.parametrize(
    "answer",
    [
        {"raw": "no json"},
        {"raw": "[1]"},
        {"raw": "1"},
        {"raw": "[" * 100_000},
        {"raw": '{"id": 1, "ok": true, "result": []}'},
        {"raw": '{"id": 1, "ok": false, "error": "x"}'},
        {"raw": '{"id": 1}'},
        {"wire": base64.b64encode(b"Z\0\0\0\0").decode()},
        {"wire": base64.b64encode(b"J\xff\xff\xff\xff").decode()},
        {"wire": base64.b64encode(b"D\0\0\0\0").decode()},
    ],
)
def test_what_is_no_frame_or_no_answer_is_a_broken_link(lies: Type, answer: dict[str, str]) -> None:
    done = lies("status", "--json", status=answer)
    assert done.code == 4, done.out
    assert done.error["kind"] in ("protocol", "transport")


def test_a_refusal_to_start_that_is_none(lies: Type) -> None:
    for after in (" nonsense", " []", ' {"what": "x", "exit": 77}'):
        done = lies("status", "--json", greeting="DFLASH-OPS-REFUSED", after=after)
        assert done.code in (4, 8), done.out


def test_key_files_of_strange_names_are_only_names(lies: Type, tmp_path: Path) -> None:
    for name in (
        "~nobody-of-that-name/id",
        "-oProxyCommand=touch evil",
        "$(touch evil)",
        "`touch evil` '\"",
        "x" * 5000,
    ):
        quoted = "'" + name.replace("'", "''") + "'"
        Path("hosts/box.yaml").write_text(
            f"transport: ssh\nssh: {{address: 127.0.0.1, port: 1, identity_file: {quoted}, known_hosts: {quoted}}}\n"
        )
        done = lies("status", "--json")
        assert (done.code, done.result["exit"]) == (4, 4), done.out
    assert written(tmp_path) == set()


def test_a_folder_of_runs_is_private(lies: Type) -> None:
    """Whatever the umask of the shell."""
    log = b"a line\n"
    entry = {"path": "log/000000.log", "size": len(log), "sha256": sha256(log), "role": "growing", "checkpoint": None}
    done = lies(
        "collect",
        status={"result": STATUS},
        files={"result": {"state": "SUCCEEDED", "files": [entry], "checkpoints": []}},
        read={"data": base64.b64encode(log).decode(), "result": {"size": len(log), "sha256": sha256(log)}},
    )
    assert done.code == 0, done.err
    folder = Path("runs") / RUN
    assert (folder / "log" / "000000.log").read_bytes() == log
    assert [path for path in [folder, *folder.rglob("*")] if path.stat().st_mode & 0o077] == []


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
