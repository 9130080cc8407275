"""The playbook's assets on the host: looked at where they lie, or brought there; what was found is what is recorded."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from dflash_ops.agent.fingerprints import BadAsset, Content, HashCache, Listed, content_of
from dflash_ops.config import Asset, Playbook
from dflash_ops.config.asset import PREFIX, USERS
from dflash_ops.deploy.amounts import sized
from dflash_ops.deploy.doctor import Diagnosis, Level
from dflash_ops.deploy.events import Events
from dflash_ops.errors import ExitCode, OpsError
from dflash_ops.transport import Conversation

TOLD_EVERY_S = 30.0
"""How far an asset that is sent has come."""
SMALL_BYTES, BATCH_BYTES, BATCH_FILES = 256 << 10, 4 << 20, 1000
"""Files up to the first go together, up to the second and the third at a time."""


@dataclass(frozen=True)
class HostAsset:
    """Where it lies on the host, and what lies there (sha256 in hex)."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Found:
    """One asset as far as it is known. `asset` is None where it is missing, wrong, or still to be sent; `coming`:
    bytes that are to be sent."""

    diagnosis: Diagnosis
    asset: HostAsset | None = None
    coming: int = 0


def examine_assets(conversation: Conversation, playbook: Playbook, events: Events) -> dict[str, Found]:
    """Changes nothing on the host."""
    return {name: look_at(conversation, name, asset, events) for name, asset in playbook.assets.items()}


def look_at(conversation: Conversation, name: str, asset: Asset, events: Events) -> Found:
    """One of them, or what is treated as one. Changes nothing on the host."""
    events.emit("asking", what=f"for the fingerprint of asset {name} (large files take a while, once)")
    return _examined(conversation, name, asset)


def bring_assets(
    conversation: Conversation, playbook: Playbook, events: Events, found: Mapping[str, Found]
) -> dict[str, Found]:
    """Sends what `examine_assets` has found to be sent; those that were. An upload that broke off goes on where it was.

    None of `found` may be a blocker.
    """
    return {
        name: _brought(conversation, name, asset, events)
        for name, asset in playbook.assets.items()
        if asset.upload is not None and found[name].asset is None
    }


def bring(conversation: Conversation, name: str, asset: Asset, events: Events) -> Found:
    """One that is treated as an asset: as it was found, or sent where that is what is missing."""
    found = look_at(conversation, name, asset, events)
    if asset.upload is None or found.asset is not None or found.diagnosis.level is Level.BLOCKER:
        return found
    return _brought(conversation, name, asset, events)


def _brought(conversation: Conversation, name: str, asset: Asset, events: Events) -> Found:
    path = _send(conversation, name, asset, events)
    content = _local(name, asset)
    return _there(name, HostAsset(path, content.fingerprint), content.size)


def resolved(settings: dict[str, Any], assets: Mapping[str, HostAsset]) -> dict[str, Any]:
    """The trainer's settings with paths in place of `asset:NAME`."""
    made = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
    for section, key in USERS:
        value = made[section].get(key)
        if isinstance(value, str) and value.startswith(PREFIX):
            asset = assets.get(value.removeprefix(PREFIX))
            made[section][key] = value if asset is None else asset.path
    return made


def as_arguments(assets: Mapping[str, HostAsset]) -> dict[str, dict[str, str]]:
    return {name: asdict(asset) for name, asset in assets.items()}


def _examined(conversation: Conversation, name: str, asset: Asset) -> Found:
    if asset.path is not None:
        answer = conversation.request("asset", {"path": asset.path})
        if answer["problem"] is not None:
            return _blocked(name, f"{answer['path']}: {answer['problem']}", "correct `path`, or put it there")
        if asset.sha256 is not None and answer["sha256"] != asset.sha256:
            what = f"{answer['path']} has the fingerprint {answer['sha256']}, not {asset.sha256}"
            return _blocked(name, what, "put the right content there, or correct `sha256` in the playbook")
        return _there(name, HostAsset(answer["path"], answer["sha256"]), int(answer["size"]))
    content = _local(name, asset)
    answer = conversation.request("asset_begin", _announced(content))
    if answer["path"] is None and int(answer["bytes"]) > int(answer["free"]):
        what = f"{sized(answer['bytes'])} are still to be sent, {sized(answer['free'])} are free"
        return _blocked(name, what, "make room in the work directory")
    if answer["path"] is None:
        what = f"asset {name}: {sized(answer['bytes'])} of {sized(content.size)} are still to be sent"
        return Found(Diagnosis(Level.OK, "host", what), coming=int(answer["bytes"]))
    return _there(name, HostAsset(answer["path"], content.fingerprint), content.size)


def _there(name: str, asset: HostAsset, size: int) -> Found:
    what = f"asset {name}: {asset.path}, {sized(size)}, sha256 {asset.sha256}"
    return Found(Diagnosis(Level.OK, "host", what), asset)


def _blocked(name: str, what: str, fix: str) -> Found:
    return Found(Diagnosis(Level.BLOCKER, "host", f"asset {name}: {what}", fix))


def _announced(content: Content) -> dict[str, Any]:
    return {
        "asset": content.fingerprint,
        "single": content.single,
        "files": [asdict(file) for file in content.files],
    }


def _cache() -> HashCache:
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "dflash-ops"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return HashCache(folder / "fingerprints.json")


def _local(name: str, asset: Asset) -> Content:
    """What is to be sent. Raises OpsError (exit 2)."""
    path = Path(asset.upload or "")
    try:
        content = content_of(path, _cache())
    except (BadAsset, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise _refused(name, f"{path} cannot be sent: {why}", "correct `upload` in the playbook") from error
    if asset.sha256 is not None and content.fingerprint != asset.sha256:
        raise _refused(
            name,
            f"{path} has the fingerprint {content.fingerprint}, not {asset.sha256}",
            "put the right content there, or correct `sha256` in the playbook",
        )
    return content


def _refused(name: str, what: str, fix: str) -> OpsError:
    return OpsError(f"asset {name}: {what}", exit_code=ExitCode.USAGE, kind="asset", where="this workstation", fix=fix)


def _send(conversation: Conversation, name: str, asset: Asset, events: Events) -> str:
    """Returns its path on the host."""
    root, content = Path(asset.upload or ""), _local(name, asset)
    begun = conversation.request("asset_begin", _announced(content))
    missing = set(begun["missing"])
    files = [file for file in content.files if file.path in missing]
    events.emit("sending", asset=name, files=len(files), bytes=int(begun["bytes"]))
    sent, progress = 0, _Progress(events, name, len(files), int(begun["bytes"]))
    for batch in _batches(files):
        paths = [root if content.single else root / file.path for file in batch]
        if len(batch) > 1:
            together = b"".join(_all_of(name, *each) for each in zip(paths, batch, strict=True))
            about = {"files": [asdict(file) for file in batch], "sha256": hashlib.sha256(together).hexdigest()}
            answer = conversation.request("asset_files", {"asset": content.fingerprint, **about}, upload=together)
            progress.moved(len(together))
        else:
            with _opened(name, paths[0], progress) as data:
                about = {"asset": content.fingerprint, **asdict(batch[0])}
                answer = conversation.request("asset_file", about, upload=data)
        sent += int(answer["sent"])
        progress.done(len(batch))
    path = str(conversation.request("asset_end", _announced(content))["path"])
    events.emit("sent", asset=name, path=path, bytes=sent)
    return path


def _batches(files: Iterable[Listed]) -> Iterator[list[Listed]]:
    """Small files many at a time: each request takes round trips."""
    small: list[Listed] = []
    room = 0
    for file in files:
        if file.size > SMALL_BYTES:
            yield [file]
            continue
        if small and (file.size > room or len(small) == BATCH_FILES):
            yield small
            small = []
        if not small:
            room = BATCH_BYTES
        small.append(file)
        room -= file.size
    if small:
        yield small


def _all_of(name: str, path: Path, file: Listed) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _changed(name, path, error.strerror or str(error)) from error
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise _changed(name, path, "its content is another one")
    return data


class _Progress:
    """Told now and then: a large asset, or one of very many files, takes hours."""

    def __init__(self, events: Events, name: str, files: int, size: int) -> None:
        self._events, self._name, self._of = events, name, {"of_files": files, "of_bytes": size}
        self._files = self._bytes = 0
        self._next = time.monotonic() + TOLD_EVERY_S

    def moved(self, count: int) -> None:
        self._bytes += count
        self._tell()

    def done(self, files: int) -> None:
        self._files += files
        self._tell()

    def _tell(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + TOLD_EVERY_S
            self._events.emit("sending_on", asset=self._name, files=self._files, bytes=self._bytes, **self._of)


class _FileBytes:
    """Slices of a file, read as they are asked for: a map of one that is cut short meanwhile kills the process."""

    def __init__(self, name: str, path: Path, file: FileIO, progress: _Progress) -> None:
        self._name, self._path, self._file, self._progress = name, path, file, progress

    def __getitem__(self, part: slice, /) -> bytes:
        try:
            self._file.seek(part.start)
            found = self._file.read(part.stop - part.start)
        except OSError as error:
            raise _changed(self._name, self._path, error.strerror or str(error)) from error
        if len(found) < part.stop - part.start:
            raise _changed(self._name, self._path, "it is shorter now")
        self._progress.moved(len(found))
        return found


@contextlib.contextmanager
def _opened(name: str, path: Path, progress: _Progress) -> Iterator[_FileBytes]:
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:
        raise _changed(name, path, error.strerror or str(error)) from error
    with file:
        yield _FileBytes(name, path, file, progress)


def _changed(name: str, path: Path, why: str) -> OpsError:
    return _refused(name, f"{path} changed while it was sent: {why}", "run the same command again")
