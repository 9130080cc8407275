"""Collecting from a host that misbehaves: nothing damaged gets a final name, nothing is written outside the run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.deploy import collecting, pieces
from dflash_ops.deploy.collecting import Choice, Collected, Collector, is_home
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.listing import Listing
from dflash_ops.deploy.records import bringing_home
from dflash_ops.errors import ExitCode, OpsError, TransportError
from dflash_ops.files import NoRoom

STEP = "out/checkpoints/step-000004"
HOME = "checkpoints/step-000004"
WEIGHTS = {f"{HOME}/{name}" for name in ("model.safetensors", "config.json", "manifest.json")}
ROLES = {
    "model.safetensors": "weights",
    "config.json": "config",
    "optimizer.safetensors": "resume",
    "manifest.json": "manifest",
}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class HostFiles:
    """Answers `files` and `read` from memory, to several at once; `cut` and `bend` spoil what is sent."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.state = "SUCCEEDED"
        self.sent: list[tuple[str, int]] = []
        self.cut: dict[str, int] = {}
        self.bend: dict[str, int] = {}
        self.streams = 1
        self.pins: list[list[str]] = []
        self.gone: set[str] = set()
        self.expected: threading.Barrier | None = None
        self._lock = threading.Lock()

    @contextmanager
    def conversation(self) -> Iterator[HostFiles]:
        yield self

    def close(self) -> None: ...

    def request(
        self, op: str, arguments: Mapping[str, Any], *, on_data: Callable[[int, bytes], None] | None = None
    ) -> dict[str, Any]:
        if op == "files":
            return {"state": self.state, "files": [self._entry(path) for path in self.files]}
        if op == "pin":
            self.pins.append(arguments["checkpoints"])
            return {"pinned": [name for name in arguments["checkpoints"] if name not in self.gone]}
        path, offset, length = arguments["path"], arguments["offset"], arguments["length"]
        if path not in self.files:
            raise OpsError("it cannot be read", exit_code=ExitCode.USAGE, kind="file")
        if self.expected is not None and path.endswith("model.safetensors") and offset < 4000:
            # the first pieces are asked for at the same time, or this does not end well
            self.expected.wait(60)
        body = self.files[path][offset : offset + length]
        self.sent.append((path, offset))
        assert on_data
        with self._lock:
            cut = self.cut.pop(path, None)
        if cut is not None:
            on_data(0, body[:cut])
            raise TransportError("the link broke", lost=True)
        digest = sha(body)
        if self.bend.get(path, 0) > 0:
            self.bend[path] -= 1
            body = bytes(255 - byte for byte in body)
        on_data(0, body)
        return {"size": len(self.files[path]), "sha256": digest if arguments.get("digest") else None}

    def _entry(self, path: str) -> dict[str, Any]:
        data, name = self.files[path], Path(path).name
        grows = name == "metrics.ndjson" or path.startswith(("log/", "out/tensorboard/"))
        role = "growing" if grows else ROLES.get(name, "record")
        return {
            "path": path,
            "size": len(data),
            "sha256": None if grows and self.state == "RUNNING" else sha(data),
            "role": role,
        }

    def write_checkpoint(self, step: int = 4, weights: bytes = b"weights" * 1000) -> None:
        files = {"model.safetensors": weights, "config.json": b"{}", "resume/optimizer.safetensors": b"moments" * 3000}
        listed = [
            {"path": path, "size": len(data), "sha256": sha(data), "role": ROLES[Path(path).name]}
            for path, data in files.items()
        ]
        manifest = json.dumps({"v": 1, "kind": "checkpoint", "step": step, "files": listed}).encode()
        for path, data in {**files, "manifest.json": manifest}.items():
            self.files[f"out/checkpoints/step-{step:06d}/{path}"] = data


@pytest.fixture
def host() -> HostFiles:
    host = HostFiles({"log/000000.log": b"line\n" * 1000, "out/metrics.ndjson": b"{}\n"})
    host.write_checkpoint()
    return host


def bring(host: HostFiles, folder: Path, **choice: bool) -> Collected:
    folder.mkdir(exist_ok=True)
    collector = Collector(host, "r", folder, Events(lambda event: None), Choice(**choice))  # type: ignore[arg-type]
    collector.bring(host)  # type: ignore[arg-type]
    return collector.collected


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_brings_everything_once(host: HostFiles, tmp_path: Path) -> None:
    first = bring(host, tmp_path)
    assert first.files == 5
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
    assert names(tmp_path) == {"log/000000.log", "metrics.ndjson", *WEIGHTS}


def test_damaged_bytes_never_get_a_name(host: HostFiles, tmp_path: Path) -> None:
    host.bend[f"{STEP}/model.safetensors"] = 2
    assert bring(host, tmp_path).checkpoints == ()
    assert not (tmp_path / "checkpoints/step-000004").exists()
    bring(host, tmp_path)
    assert (tmp_path / "checkpoints/step-000004/model.safetensors").read_bytes() == b"weights" * 1000


def test_a_checkpoint_that_is_damaged_on_the_host_keeps_nothing_else_away(host: HostFiles, tmp_path: Path) -> None:
    host.write_checkpoint(8)
    listed = host.request("files", {})
    host.files["out/checkpoints/step-000008/model.safetensors"] = b"WEIGHTS" * 1000
    host.request = _listing_once(host, listed)  # type: ignore[method-assign]
    collector = Collector(host, "r", tmp_path, Events(lambda event: None), Choice())  # type: ignore[arg-type]
    collector.bring(host)  # type: ignore[arg-type]
    assert collector.collected.checkpoints == ("step-000004",)
    assert not (tmp_path / "checkpoints/step-000008").exists()
    assert collector.damaged is not None
    assert collector.damaged.exit_code is ExitCode.BLOCKED
    assert "step-000008" in collector.damaged.what
    # a follow looks every few seconds: it is not brought each time
    host.sent.clear()
    collector.bring(host)  # type: ignore[arg-type]
    assert not [path for path, _ in host.sent if "step-000008" in path]


def test_what_is_written_anew_while_it_is_read_is_asked_for_again(host: HostFiles, tmp_path: Path) -> None:
    host.state, answer = "RUNNING", host.request
    host.files["out/at_work.ndjson"] = b"first " * 20
    later = [b"second " * 10, b"third\n"]

    def changes_when_listed(op: str, arguments: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        told = answer(op, arguments, **more)
        if op == "files" and later:
            host.files["out/at_work.ndjson"] = later.pop(0)
        return told

    host.request = changes_when_listed  # type: ignore[method-assign]
    assert bring(host, tmp_path).checkpoints == ("step-000004",)
    assert (tmp_path / "out/at_work.ndjson").read_bytes() == b"third\n"


@pytest.mark.parametrize("harm", [lambda old: old[:-1], lambda old: old[::-1]], ids=["shorter", "another"])
def test_what_never_holds_still_stops_nothing_while_the_run_goes_on(
    host: HostFiles, tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    host.state, answer = "RUNNING", host.request
    host.files["out/at_work.ndjson"] = b"0123456789"
    told: list[dict[str, Any]] = []

    def changes_when_listed(op: str, arguments: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        answered = answer(op, arguments, **more)
        if op == "files":
            host.files["out/at_work.ndjson"] = harm(host.files["out/at_work.ndjson"])
        return answered

    host.request = changes_when_listed  # type: ignore[method-assign]
    collector = Collector(host, "r", tmp_path, Events(told.append), Choice())  # type: ignore[arg-type]
    collector.bring(host)  # type: ignore[arg-type]
    assert collector.collected.checkpoints == ("step-000004",)
    assert not (tmp_path / "out/at_work.ndjson").exists(), "here it is whole or absent"
    assert [event["text"] for event in told if event["event"] == "notice"] == [
        "out/at_work.ndjson is being written just now: it comes with the next look"
    ]


def test_a_log_that_grew_is_continued(host: HostFiles, tmp_path: Path) -> None:
    bring(host, tmp_path)
    host.files["log/000000.log"] += b"more\n"
    bring(host, tmp_path)
    assert (tmp_path / "log/000000.log").read_bytes().endswith(b"more\n")


def test_tensorboards_files_lie_where_it_looks_for_a_run_and_grow(host: HostFiles, tmp_path: Path) -> None:
    host.files["out/tensorboard/train/events.out.tfevents.000000"] = b"event" * 100
    host.state = "RUNNING"
    bring(host, tmp_path)
    host.files["out/tensorboard/train/events.out.tfevents.000000"] += b"more"
    host.sent.clear()
    bring(host, tmp_path)
    assert ("out/tensorboard/train/events.out.tfevents.000000", 500) in host.sent
    events = tmp_path / "tensorboard/train/events.out.tfevents.000000"
    assert events.read_bytes() == b"event" * 100 + b"more"


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


@pytest.mark.parametrize("link", ["checkpoints", HOME, "log", ".incoming"])
def test_nothing_is_written_through_a_link(host: HostFiles, tmp_path: Path, link: str) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    (folder / link).parent.mkdir(parents=True)
    (folder / link).symlink_to(outside)
    with pytest.raises(OpsError, match="is a link") as refused:
        bring(host, folder)
    assert refused.value.exit_code is ExitCode.BLOCKED
    assert str(folder / link) in refused.value.what
    assert list(outside.iterdir()) == []


def test_a_link_in_a_files_place_makes_way_for_the_file(host: HostFiles, tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "run"
    folder.mkdir()
    outside.write_bytes(b"")
    (folder / "metrics.ndjson").symlink_to(outside)
    bring(host, folder)
    assert (folder / "metrics.ndjson").read_bytes() == host.files["out/metrics.ndjson"]
    assert not (folder / "metrics.ndjson").is_symlink()
    assert outside.read_bytes() == b""


def test_what_was_moved_away_whole_and_linked_is_here(host: HostFiles, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    bring(host, folder)
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    (folder / "checkpoints").symlink_to(tmp_path / "elsewhere")
    assert bring(host, folder).checkpoints == ("step-000004",)


def test_what_a_trainer_writes_takes_no_records_place(host: HostFiles, tmp_path: Path) -> None:
    host.files["verdict.json"] = b'{"real": true}'
    host.files["out/verdict.json"] = b'{"forged": true}'
    host.files["out/status.json"] = b"{}"
    bring(host, tmp_path)
    assert (tmp_path / "verdict.json").read_bytes() == b'{"real": true}'
    assert (tmp_path / "out/verdict.json").read_bytes() == b'{"forged": true}'
    assert not (tmp_path / "status.json").exists()


def claimed(folder: Path) -> set[str]:
    manifest = json.loads((folder / HOME / "manifest.json").read_bytes())
    return {entry["path"] for entry in manifest["files"]}


def test_weights_come_without_the_optimizer_state_and_the_manifest_claims_only_them(
    host: HostFiles, tmp_path: Path
) -> None:
    bring(host, tmp_path)
    assert {name for name in names(tmp_path) if name.startswith(HOME)} == WEIGHTS
    assert claimed(tmp_path) == {"model.safetensors", "config.json"}
    assert json.loads((tmp_path / HOME / "manifest.json").read_bytes())["left_out"] == ["resume/optimizer.safetensors"]


def test_the_optimizer_state_completes_what_is_here(host: HostFiles, tmp_path: Path) -> None:
    bring(host, tmp_path)
    host.sent.clear()
    assert bring(host, tmp_path, optimizer=True).files == 2
    assert f"{STEP}/model.safetensors" not in [path for path, _ in host.sent]
    for path, data in host.files.items():
        if path.startswith(STEP):
            assert (tmp_path / HOME / path.removeprefix(f"{STEP}/")).read_bytes() == data
    # and asked for without it, nothing is taken away
    assert bring(host, tmp_path).files == 0
    assert "resume/optimizer.safetensors" in claimed(tmp_path)


def test_a_cut_completion_leaves_what_was_whole(host: HostFiles, tmp_path: Path) -> None:
    bring(host, tmp_path)
    host.cut[f"{STEP}/resume/optimizer.safetensors"] = 1000
    with pytest.raises(TransportError):
        bring(host, tmp_path, optimizer=True)
    assert claimed(tmp_path) == {"model.safetensors", "config.json"}
    # another command, that does not want it, leaves nothing of it
    bring(host, tmp_path)
    assert {name for name in names(tmp_path) if name.startswith(HOME)} == WEIGHTS


def test_only_the_newest_checkpoint(host: HostFiles, tmp_path: Path) -> None:
    host.write_checkpoint(8)
    assert bring(host, tmp_path, last=True).checkpoints == ("step-000008",)
    assert bring(host, tmp_path).checkpoints == ("step-000004", "step-000008")


def test_what_is_brought_is_pinned_until_it_is_here(host: HostFiles, tmp_path: Path) -> None:
    host.write_checkpoint(8)
    host.gone.add("step-000004")
    assert bring(host, tmp_path).checkpoints == ("step-000008",)
    assert host.pins == [["step-000004", "step-000008"], []]


def test_a_checkpoint_that_is_not_kept_any_more_stops_nothing(host: HostFiles, tmp_path: Path) -> None:
    host.write_checkpoint(8)
    listed = host.request("files", {})
    del host.files[f"{STEP}/model.safetensors"]
    host.request = _listing_once(host, listed)  # type: ignore[method-assign]
    assert bring(host, tmp_path).checkpoints == ("step-000008",)
    assert not (tmp_path / HOME).exists()


def test_a_file_of_the_log_that_was_dropped_meanwhile_stops_nothing_and_is_told(
    host: HostFiles, tmp_path: Path
) -> None:
    host.files["log/000001.log"] = b"second\n"
    listed = host.request("files", {})
    del host.files["log/000001.log"]
    host.request = _listing_once(host, listed)  # type: ignore[method-assign]
    told: list[dict[str, Any]] = []
    collector = Collector(host, "r", tmp_path, Events(told.append), Choice())  # type: ignore[arg-type]
    collector.bring(host)  # type: ignore[arg-type]
    assert [event["text"] for event in told if event["event"] == "notice"] == [
        "log/000001.log is not kept on the host any more"
    ]
    assert (tmp_path / "log/000000.log").exists()
    assert not (tmp_path / "log/000001.log").exists()


def _listing_once(host: HostFiles, listed: dict[str, Any]) -> Any:
    answer = host.request
    return lambda op, arguments, **more: listed if op == "files" else answer(op, arguments, **more)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(pieces, "STREAM_BYTES", 2000)


@pytest.mark.usefixtures("small_pieces")
def test_pieces_of_one_file_come_over_several_conversations(host: HostFiles, tmp_path: Path) -> None:
    host.streams, host.expected = 4, threading.Barrier(4)
    host.write_checkpoint(weights=bytes(range(256)) * 400)
    bring(host, tmp_path)
    assert (tmp_path / HOME / "model.safetensors").read_bytes() == bytes(range(256)) * 400
    assert sorted(offset for path, offset in host.sent if path.endswith("model.safetensors")) == list(
        range(0, 102400, 1000)
    )


@pytest.mark.usefixtures("small_pieces")
def test_what_one_broken_conversation_left_is_brought_by_the_others(host: HostFiles, tmp_path: Path) -> None:
    host.streams = 2
    host.cut[f"{STEP}/model.safetensors"] = 300
    bring(host, tmp_path)
    assert (tmp_path / HOME / "model.safetensors").read_bytes() == b"weights" * 1000
    # whichever piece it was
    assert 300 in {offset % 1000 for path, offset in host.sent if path.endswith("model.safetensors")}


@pytest.mark.usefixtures("small_pieces")
def test_a_full_disk_here_ends_all_of_them_and_what_came_is_kept(
    host: HostFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.streams = 3
    write, written = os.pwrite, 0

    def until_full(file: int, data: bytes, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 5000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", until_full)
    with pytest.raises(NoRoom, match="No space left") as caught:
        bring(host, tmp_path)
    assert Path(caught.value.filename).parent.name == "step-000004" and caught.value.needed
    assert not (tmp_path / HOME).exists()
    monkeypatch.undo()
    bring(host, tmp_path)
    assert (tmp_path / HOME / "model.safetensors").read_bytes() == b"weights" * 1000


@pytest.mark.usefixtures("small_pieces")
def test_pieces_that_are_here_are_not_brought_again(host: HostFiles, tmp_path: Path) -> None:
    host.cut[f"{STEP}/model.safetensors"] = 10
    with pytest.raises(TransportError):
        bring(host, tmp_path)
    host.sent.clear()
    bring(host, tmp_path)
    offsets = [offset for path, offset in host.sent if path.endswith("model.safetensors")]
    assert offsets[:2] == [10, 1010]


def test_a_part_that_was_damaged_here_is_thrown_away_and_brought_again(host: HostFiles, tmp_path: Path) -> None:
    host.cut[f"{STEP}/model.safetensors"] = 500
    with pytest.raises(TransportError):
        bring(host, tmp_path)
    (part,) = (tmp_path / ".incoming").rglob("model.safetensors.part")
    part.write_bytes(b"x" * 500)
    bring(host, tmp_path)
    assert (tmp_path / HOME / "model.safetensors").read_bytes() == b"weights" * 1000


def test_a_checkpoint_that_does_not_fit_here_is_refused_before_a_byte(
    host: HostFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 100, 100))  # type: ignore[attr-defined]
    with pytest.raises(OpsError, match="100 bytes free, 7002 needed") as refused:
        bring(host, tmp_path)
    assert refused.value.exit_code is ExitCode.BLOCKED
    assert (tmp_path / "log/000000.log").exists()
    assert not (tmp_path / HOME).exists()


def test_a_running_log_is_appended_to_and_checked_at_the_end(host: HostFiles, tmp_path: Path) -> None:
    host.state = "RUNNING"
    bring(host, tmp_path)
    host.files["log/000000.log"] += b"more\n"
    host.sent.clear()
    bring(host, tmp_path)
    assert ("log/000000.log", 5000) in host.sent
    # what is not the beginning of the host's is brought again as a whole
    (tmp_path / "log/000000.log").write_bytes(b"x" * 5000)
    host.state = "SUCCEEDED"
    bring(host, tmp_path)
    assert (tmp_path / "log/000000.log").read_bytes() == host.files["log/000000.log"]


def test_two_commands_do_not_bring_one_run_at_once(tmp_path: Path) -> None:
    with bringing_home(tmp_path):
        with (
            pytest.raises(OpsError, match=f"process {os.getpid()} on this workstation") as refused,
            bringing_home(tmp_path),
        ):
            pass
        assert refused.value.exit_code is ExitCode.LOCKED
    with bringing_home(tmp_path):
        pass


def test_a_run_is_home_when_all_of_it_is_here_and_every_checkpoint_has_its_manifest(
    host: HostFiles, tmp_path: Path
) -> None:
    bring(host, tmp_path)
    listing = Listing.of(host.request("files", {}))
    assert is_home(listing, tmp_path)
    manifest = tmp_path / HOME / "manifest.json"
    kept = manifest.read_bytes()
    for damage in (b"", b'{"files": []}', b"[]"):
        manifest.write_bytes(damage)
        assert not is_home(listing, tmp_path)
    manifest.write_bytes(kept)
    (tmp_path / HOME / "model.safetensors").write_bytes(b"bitrot")
    assert not is_home(listing, tmp_path)
