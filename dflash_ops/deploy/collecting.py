"""Brings a run's files home: verified by sha256, resumed where they broke off, whole or absent at their final name.

What is not whole yet lies in `runs/<run>/.incoming/` and nowhere else.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dflash_ops.deploy.events import Events
from dflash_ops.deploy.listing import Listing, RemoteCheckpoint, RemoteFile
from dflash_ops.deploy.pieces import Item, Source, fetch, sha256_of
from dflash_ops.errors import AGAIN, ExitCode, OpsError, TransportError
from dflash_ops.files import sync_folder, write_bytes, writing
from dflash_ops.transport import Conversation

INCOMING = ".incoming"
CHECKPOINTS = "checkpoints"
RUNNING = "RUNNING"
LOOKS = 3
"""At what a trainer writes anew just while it is read, before it is left for the next command."""
GROWTH_BYTES = 8 << 20
"""A log is appended to in blocks of this size, each verified."""


@dataclass(frozen=True)
class Choice:
    """What of the checkpoints is wanted."""

    optimizer: bool = False
    """Also what only a resumed run needs: several times the size of the weights."""
    last: bool = False
    """Only the newest checkpoint."""


@dataclass
class Collected:
    """How much was brought by this command; what was here already and equal is not counted."""

    files: int = 0
    bytes: int = 0
    checkpoints: tuple[str, ...] = ()
    """All that are here now and were wanted, by step."""


class Collector:
    """One run on its way home. `bring` may be called as often as one likes, also while the run goes on."""

    def __init__(self, source: Source, run: str, folder: Path, events: Events, choice: Choice) -> None:
        self._source = source
        self._run = run
        self._folder = folder
        self._incoming = folder / INCOMING
        self._events = events
        self._choice = choice
        self._whole: set[str] = set()
        self._damaged: dict[str, OpsError] = {}
        self._restless: set[PurePosixPath] = set()
        self.collected = Collected()

    def bring(self, conversation: Conversation) -> Listing:
        """Everything that is complete on the host now and is not here. Newest checkpoint first: it is worth most."""
        listing = self._bring_files(conversation)
        wanted = listing.checkpoints[-1:] if self._choice.last else listing.checkpoints
        done = {*self._whole, *self._damaged}
        self._bring_checkpoints(conversation, [one for one in wanted if one.name not in done])
        self.collected.checkpoints = tuple(sorted(self._whole))
        shutil.rmtree(self._incoming, ignore_errors=True)
        return listing

    @property
    def damaged(self) -> OpsError | None:
        """Of the newest checkpoint that is damaged on the host (exit 5): nothing else waits for it."""
        return self._damaged[max(self._damaged)] if self._damaged else None

    # ---- records, log, metrics

    def _bring_files(self, conversation: Conversation) -> Listing:
        """A trainer may write a file anew while it is read: it is listed once more, and never here half old."""
        listing = Listing.of(conversation.request("files", {"run": self._run}))
        changed = self._changed(conversation, listing.files)
        for _ in range(LOOKS - 1):
            if not changed:
                return listing
            listing = Listing.of(conversation.request("files", {"run": self._run}))
            changed = self._changed(conversation, [file for file in listing.files if file.path in changed])
        if not changed:
            return listing
        if listing.state != RUNNING:
            raise _damaged(min(changed))
        for path in sorted(changed - self._restless):
            self._events.emit("notice", text=f"{path} is being written just now: it comes with the next look")
        self._restless |= changed
        return listing

    def _changed(self, conversation: Conversation, files: Iterable[RemoteFile]) -> set[PurePosixPath]:
        """Brings them, but for these: they are not any more what was listed."""
        return {file.path for file in files if not self._bring_file(conversation, file)}

    def _bring_file(self, conversation: Conversation, file: RemoteFile) -> bool:
        """False where it is not any more what was listed."""
        target = self._folder.joinpath(*file.home.parts)
        here = _size(target)
        if here == file.size and (file.sha256 is None or sha256_of(target) == file.sha256):
            return True
        self._make_way(target)
        grows = file.role == "growing" and here is not None and here < file.size and not target.is_symlink()
        try:
            if grows:
                moved = self._append(conversation, file, target)
                grows = file.sha256 is None or sha256_of(target) == file.sha256
            else:
                moved = 0
            if not grows:
                moved += self._replace(conversation, file, target)
        except _Changed:
            return False
        except OpsError as error:
            if error.kind != "file":
                raise
            # the host keeps no more of a log than its cap
            self._events.emit("notice", text=f"{file.path} is not kept on the host any more")
            return True
        self.collected.files += 1
        self.collected.bytes += moved
        return True

    def _replace(self, conversation: Conversation, file: RemoteFile, target: Path) -> int:
        part = self._incoming.joinpath(*file.path.parts)
        self._make_way(part)
        part.unlink(missing_ok=True)
        part.touch(mode=0o600)
        size = self._append(conversation, file, part)
        if file.sha256 is not None and sha256_of(part) != file.sha256:
            raise _Changed
        part.replace(target)
        sync_folder(target.parent)
        return size

    def _append(self, conversation: Conversation, file: RemoteFile, target: Path) -> int:
        """Goes on from the end of `target`: any beginning of a log is a whole one, so it grows in place."""
        moved = 0
        with writing(target), target.open("ab", buffering=0) as handle:
            while (at := handle.tell()) < file.size:
                block = self._read(conversation, file, at, min(GROWTH_BYTES, file.size - at))
                with writing(target, file.size - at):
                    _write_all(handle, block)
                moved += len(block)
        return moved

    def _read(self, conversation: Conversation, file: RemoteFile, offset: int, length: int) -> bytes:
        blocks: list[bytes] = []
        result = conversation.request(
            "read",
            {"run": self._run, "path": str(file.path), "offset": offset, "length": length, "digest": True},
            on_data=lambda stream, data: blocks.append(data),
        )
        block = b"".join(blocks)
        if len(block) > length or hashlib.sha256(block).hexdigest() != result["sha256"]:
            raise _damaged(file.path)
        if len(block) < length:
            raise _Changed
        return block

    # ---- checkpoints

    def _bring_checkpoints(self, conversation: Conversation, wanted: list[RemoteCheckpoint]) -> None:
        if not wanted:
            return
        # from here on the host keeps them, as long as this conversation lives
        pinned = self._pin(conversation, [one.name for one in wanted])
        for checkpoint in reversed(wanted):
            try:
                if checkpoint.name in pinned and self._bring_checkpoint(conversation, checkpoint):
                    self._whole.add(checkpoint.name)
            except TransportError as error:
                if error.kind != "verify":
                    raise
                # the others are worth as much as they were
                self._damaged[checkpoint.name] = there = _damaged_there(checkpoint, error)
                self._events.emit("notice", text=f"{there.what}; the others are brought")
        self._pin(conversation, [])

    def _pin(self, conversation: Conversation, names: list[str]) -> list[str]:
        return list(conversation.request("pin", {"run": self._run, "checkpoints": names})["pinned"])

    def _bring_checkpoint(self, conversation: Conversation, checkpoint: RemoteCheckpoint) -> bool:
        """False when the host has it no more."""
        final, stage = self._folder / CHECKPOINTS / checkpoint.name, self._incoming / CHECKPOINTS / checkpoint.name
        wanted = checkpoint.wanted(optimizer=self._choice.optimizer)
        here = {path for path, file in checkpoint.files.items() if _size(final / path) == file.size}
        damaged = final.exists() and any(
            not _same(final / path, file) for path, file in wanted.items() if (final / path).exists()
        )
        missing = {path: file for path, file in wanted.items() if damaged or path not in here}
        try:
            original = self._read(conversation, checkpoint.manifest, 0, checkpoint.manifest.size)
            moved = self._fetch(conversation, missing, stage)
        except OpsError as error:
            if error.kind != "file":
                raise
            self._events.emit("notice", text=f"{checkpoint.name} is not kept on the host any more")
            return False
        except _Changed:
            self._events.emit("notice", text=f"{checkpoint.name} is being written anew on the host")
            return False
        manifest = local_manifest(original, set(wanted) if damaged else here | set(wanted))
        if not missing and _read_bytes(final / "manifest.json") == manifest:
            return True
        self._make_way(final)
        if damaged:
            _set_aside(final)
        for path in (*missing, "manifest.json") if os.path.lexists(final) else ():
            self._make_way(final / path)
        _publish(stage, final, missing, manifest)
        self.collected.files += len(missing) + 1
        self.collected.bytes += moved
        self._events.emit("checkpoint", run=self._run, path=str(final), bytes=moved)
        return True

    def _fetch(self, conversation: Conversation, missing: dict[str, RemoteFile], stage: Path) -> int:
        items = [Item(str(file.path), file.size, file.sha256 or "", stage / path) for path, file in missing.items()]
        for item in items:
            self._make_way(item.target)
        items = [item for item in items if not (_size(item.target) == item.size and _is_hashed(item))]
        self._refuse_full_disk(sum(item.size for item in items))
        try:
            return fetch(conversation, self._source, self._run, items)
        except TransportError as error:
            if error.kind != "verify":
                raise
            # a part that an earlier command left may be damaged: once more, from nothing
            return fetch(conversation, self._source, self._run, [item for item in items if not item.target.exists()])

    def _make_way(self, target: Path) -> None:
        """Makes the folders above `target`. OpsError (exit 5) where one is a link: all lands below the run's folder."""
        inside = target.relative_to(self._folder).parents
        for folder in [self._folder / each for each in reversed(inside)][1:]:
            if folder.is_symlink():
                raise OpsError(
                    f"{folder} is a link: nothing is written through one",
                    exit_code=ExitCode.BLOCKED,
                    kind="workstation",
                    where="this workstation",
                    fix="put what it leads to in its place, or bring the run elsewhere: `--runs DIRECTORY`",
                )
        target.parent.mkdir(parents=True, exist_ok=True)

    def _refuse_full_disk(self, needed: int) -> None:
        """Before a byte of it is brought: what half fits helps nobody."""
        free = shutil.disk_usage(self._folder).free + _used(self._incoming)
        if needed > free:
            raise OpsError(
                f"no space for the next checkpoint: {free} bytes free, {needed} needed, {needed - free} missing",
                exit_code=ExitCode.BLOCKED,
                kind="workstation",
                where=f"this workstation, {self._folder}",
                fix="make room, or bring only the newest one: `dflash-ops collect --last`",
            )


class _Changed(Exception):  # noqa: N818
    """The file is not any more what the host listed."""


def _damaged(path: PurePosixPath) -> TransportError:
    return TransportError(f"{path} arrived damaged and was thrown away", kind="verify", fix=AGAIN)


def _damaged_there(checkpoint: RemoteCheckpoint, error: TransportError) -> OpsError:
    """Brought twice, and twice not what its own manifest says."""
    return OpsError(
        f"the host's checkpoint {checkpoint.name} is damaged: {error.what}, twice",
        exit_code=ExitCode.BLOCKED,
        kind="checkpoint",
        where=f"{checkpoint.manifest.path.parent} of the run, on its host",
        fix="everything else is here; `resume` passes over that one; to be rid of this message, remove it there",
    )


def is_home(listing: Listing, folder: Path) -> bool:
    """Whether all that the host lists is in `folder`, verified by its hash; the optimizer state is not asked for."""
    files = {folder.joinpath(*file.home.parts): file for file in listing.files}
    for checkpoint in listing.checkpoints:
        final, wanted = folder / CHECKPOINTS / checkpoint.name, checkpoint.wanted(optimizer=False)
        if not set(wanted) <= _claimed(final / "manifest.json"):
            # without a manifest a checkpoint does not exist
            return False
        files.update({final / path: file for path, file in wanted.items()})
    return all(_same(path, file) for path, file in files.items())


def _claimed(manifest: Path) -> set[str]:
    try:
        return {str(entry["path"]) for entry in json.loads(manifest.read_bytes())["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def local_manifest(original: bytes, here: set[str]) -> bytes:
    """The host's manifest, of the files that are here: it never claims one that is not.

    Byte for byte the host's where all are here; otherwise `left_out` names the others.
    """
    value = json.loads(original)
    left_out = sorted(str(entry["path"]) for entry in value["files"] if entry["path"] not in here)
    if not left_out:
        return original
    value["files"] = [entry for entry in value["files"] if entry["path"] in here]
    return (json.dumps({**value, "left_out": left_out}, indent=1) + "\n").encode()


def _publish(stage: Path, final: Path, brought: dict[str, RemoteFile], manifest: bytes) -> None:
    """One rename where there is none yet; otherwise the new files, and then the manifest that claims them."""
    stage.mkdir(parents=True, exist_ok=True)
    for left in [path for path in stage.rglob("*") if path.is_file()]:
        if str(left.relative_to(stage)) not in brought:
            # left by an earlier command that wanted more, or was killed
            left.unlink()
    if not final.exists():
        write_bytes(stage / "manifest.json", manifest)
        for folder in {(stage / path).parent for path in brought}:
            sync_folder(folder)
        final.parent.mkdir(parents=True, exist_ok=True)
        stage.rename(final)
        sync_folder(final.parent)
        return
    for path in brought:
        target = final / path
        (stage / path).replace(target)
        sync_folder(target.parent)
    write_bytes(final / "manifest.json", manifest)


def _set_aside(folder: Path) -> None:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    folder.rename(aside)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _same(path: Path, file: RemoteFile) -> bool:
    return _size(path) == file.size and sha256_of(path) == file.sha256


def _is_hashed(item: Item) -> bool:
    return sha256_of(item.target) == item.sha256


def _read_bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _used(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _write_all(handle: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[handle.write(view) :]
