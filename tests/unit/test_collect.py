"""Collecting from a host that misbehaves: nothing damaged gets a final name, nothing is written outside the run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.deploy.collecting import collect
from dflash_ops.deploy.events import Events
from dflash_ops.errors import TransportError

STEP = "out/checkpoints/step-000004"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class HostFiles:
    """Answers `files` and `read` from memory; `cut` and `bend` spoil what is sent."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.sent: list[tuple[str, int]] = []
        self.cut: dict[str, int] = {}
        self.bend: set[str] = set()

    def request(
        self, op: str, arguments: Mapping[str, Any], *, on_data: Callable[[int, bytes], None] | None = None
    ) -> dict[str, Any]:
        if op == "files":
            return {
                "files": [{"path": path, "size": len(data), "sha256": sha(data)} for path, data in self.files.items()]
            }
        path, offset = arguments["path"], arguments["offset"]
        data = self.files[path]
        self.sent.append((path, offset))
        body = data[offset:]
        if path in self.cut:
            assert on_data
            on_data(0, body[: self.cut.pop(path)])
            raise TransportError("the link broke", lost=True)
        assert on_data
        on_data(0, bytes(255 - byte for byte in body) if path in self.bend else body)
        return {"size": len(data), "sha256": sha(data)}


@pytest.fixture
def host() -> HostFiles:
    return HostFiles(
        {
            "log/000000.log": b"line\n" * 1000,
            "out/metrics.ndjson": b"{}\n",
            f"{STEP}/model.safetensors": b"weights" * 1000,
            f"{STEP}/manifest.json": b"{}",
        }
    )


def bring(host: HostFiles, folder: Path) -> Any:
    return collect(host, "r", folder, Events(lambda event: None))  # type: ignore[arg-type]


def test_brings_everything_once(host: HostFiles, tmp_path: Path) -> None:
    first = bring(host, tmp_path)
    assert first.files == 4
    assert first.checkpoints == ("step-000004",)
    assert (tmp_path / "checkpoints/step-000004/model.safetensors").read_bytes() == b"weights" * 1000
    assert (tmp_path / "metrics.ndjson").exists()
    assert bring(host, tmp_path).files == 0


def test_goes_on_where_the_link_broke(host: HostFiles, tmp_path: Path) -> None:
    host.cut[f"{STEP}/model.safetensors"] = 100
    with pytest.raises(TransportError):
        bring(host, tmp_path)
    assert not (tmp_path / "checkpoints/step-000004").exists(), "a checkpoint is whole or absent"
    host.sent.clear()
    bring(host, tmp_path)
    assert (f"{STEP}/model.safetensors", 100) in host.sent
    assert (tmp_path / "checkpoints/step-000004/model.safetensors").read_bytes() == b"weights" * 1000
    assert not list(tmp_path.rglob("*.part"))


def test_damaged_bytes_never_get_a_name(host: HostFiles, tmp_path: Path) -> None:
    host.bend.add(f"{STEP}/model.safetensors")
    with pytest.raises(TransportError, match="damaged"):
        bring(host, tmp_path)
    assert not (tmp_path / "checkpoints/step-000004").exists()
    host.bend.clear()
    bring(host, tmp_path)
    assert (tmp_path / "checkpoints/step-000004/model.safetensors").read_bytes() == b"weights" * 1000


def test_a_log_that_grew_is_continued(host: HostFiles, tmp_path: Path) -> None:
    bring(host, tmp_path)
    host.files["log/000000.log"] += b"more\n"
    bring(host, tmp_path)
    assert (tmp_path / "log/000000.log").read_bytes().endswith(b"more\n")


def test_a_checkpoint_damaged_here_is_set_aside_and_brought_again(host: HostFiles, tmp_path: Path) -> None:
    bring(host, tmp_path)
    (tmp_path / "checkpoints/step-000004/model.safetensors").write_bytes(b"bitrot")
    bring(host, tmp_path)
    assert (tmp_path / "checkpoints/step-000004/model.safetensors").read_bytes() == b"weights" * 1000
    assert (tmp_path / "checkpoints/step-000004.damaged-1/model.safetensors").read_bytes() == b"bitrot"


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "out/../../outside", ""])
def test_a_path_outside_the_run_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(TransportError, match="outside"):
        bring(HostFiles({path: b"x"}), tmp_path / "run")
    assert not (tmp_path / "outside").exists()


def test_what_a_trainer_writes_takes_no_records_place(host: HostFiles, tmp_path: Path) -> None:
    host.files["verdict.json"] = b'{"real": true}'
    host.files["out/verdict.json"] = b'{"forged": true}'
    host.files["out/status.json"] = b"{}"
    bring(host, tmp_path)
    assert (tmp_path / "verdict.json").read_bytes() == b'{"real": true}'
    assert (tmp_path / "out/verdict.json").read_bytes() == b'{"forged": true}'
    assert not (tmp_path / "status.json").exists()
