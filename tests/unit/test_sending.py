"""An asset that changes while it is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_ops.config import Asset
from dflash_ops.deploy import assets
from dflash_ops.deploy.assets import _send
from dflash_ops.deploy.events import Events
from dflash_ops.errors import OpsError


class Host:
    """Misses everything, and takes what comes in pieces of four bytes; `meanwhile` happens after the first."""

    def __init__(self, meanwhile: Any = lambda: None) -> None:
        self.got = b""
        self.asked: list[str] = []
        self._meanwhile = meanwhile

    def request(self, op: str, arguments: dict[str, Any], *, upload: Any = b"", **_: Any) -> dict[str, Any]:
        self.asked.append(op)
        if op == "asset_begin":
            files = arguments["files"]
            return {"missing": [each["path"] for each in files], "bytes": sum(each["size"] for each in files)}
        if op == "asset_files":
            self.got += upload
            return {"sent": len(upload)}
        if op == "asset_file":
            for first in range(0, arguments["size"], 4):
                self.got += upload[first : min(first + 4, arguments["size"])]
                self._meanwhile()
            return {"sent": arguments["size"]}
        return {"path": "/there", "sha256": "0" * 64, "present": False, "bytes": 0, "missing": 0}


def test_it_is_read_as_it_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_bytes(b"0123456789")
    host = Host()
    sent(host, file)
    assert host.got == b"0123456789"


def test_one_that_is_cut_short_meanwhile_is_one_error(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_bytes(b"0123456789")
    with pytest.raises(OpsError, match=r"rows changed while it was sent: it is shorter now") as told:
        sent(Host(lambda: file.write_bytes(b"012")), file)
    assert told.value.exit_code == 2


def test_it_is_told_how_far_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "TOLD_EVERY_S", 0.0)
    monkeypatch.setattr(assets, "SMALL_BYTES", 9)
    for name in "ab":
        (tmp_path / name).write_bytes(b"0123456789")
    told = [event for event in sent(Host(), tmp_path) if event["event"] == "sending_on"]
    assert [(event["files"], event["bytes"]) for event in told][-1] == (2, 20)
    assert {(event["of_files"], event["of_bytes"]) for event in told} == {(2, 20)}
    assert (0, 4) in [(event["files"], event["bytes"]) for event in told], "also within one large file"


def test_small_files_go_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "SMALL_BYTES", 10)
    monkeypatch.setattr(assets, "BATCH_BYTES", 35)
    monkeypatch.setattr(assets, "BATCH_FILES", 4)
    sizes = {"a": 10, "b": 11, "c": 10, "d": 10, "e": 10, "f": 0, "g": 1, "h": 1, "i": 1, "j": 1}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(name.encode() * size)
    host = Host()
    told = sent(host, tmp_path)
    assert host.asked == ["asset_begin", "asset_file", *["asset_files"] * 3, "asset_end"]
    assert host.got == b"b" * 11 + b"a" * 10 + b"c" * 10 + b"d" * 10 + b"e" * 10 + b"ghij"
    assert told[-1]["bytes"] == sum(sizes.values())


def test_a_small_file_that_is_another_one_meanwhile_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"0123456789")
    known = assets._local("rows", Asset(upload=str(tmp_path)))
    monkeypatch.setattr(assets, "_local", lambda *_: known)
    (tmp_path / "b").write_bytes(b"0123456780")
    with pytest.raises(OpsError, match=r"b changed while it was sent: its content is another one"):
        sent(Host(), tmp_path)


def sent(host: Host, file: Path) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    _send(host, "rows", Asset(upload=str(file)), Events(told.append))  # type: ignore[arg-type]
    return told
