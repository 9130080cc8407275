"""Target weights and datasets: those that lie on the host, and those that come over the wire into `assets/<sha256>`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from .arguments import Arguments
from .conversation import Conversation
from .disk import free_bytes
from .errors import AgentError, ExitCode
from .files import fsync_folder, is_safe_relative, remove_tree
from .fingerprints import BadAsset, Content, HashCache, Listed, content_of
from .manifest import parents_of
from .uploads import Archive, upload_archive
from .workdir import WorkDir

_SETTLED = 0
"""The modification time of what was uploaded: any later one tells that somebody wrote to it."""


@dataclass(frozen=True)
class Asset:
    """What a run is started with: `path` on this host, and what lay there (sha256 in hex)."""

    path: str
    sha256: str

    @classmethod
    def all_from(cls, args: Arguments) -> "Dict[str, Asset]":
        """From `assets` of a request: name → path, sha256."""
        found = {}
        for name in args.optional_table("assets"):
            given = Arguments(f"{args.op} assets.{name}", args.table("assets")).table(name)
            one = Arguments(f"{args.op} assets.{name}", given)
            found[name] = cls(one.text("path"), one.digest("sha256"))
        return found


def hashes(work: WorkDir) -> HashCache:
    return HashCache(work.root / "fingerprints.json")


def refuse_changed(work: WorkDir, assets: Dict[str, Asset]) -> None:
    """AgentError `asset` (exit 5) where one is not what the doctor saw any more."""
    cache = hashes(work)
    for name, asset in assets.items():
        found, why = _look(Path(asset.path), cache)
        if found is None or found.fingerprint != asset.sha256:
            raise AgentError(
                "asset",
                f"the asset {name!r} changed after it was checked: {why or 'its content is another one'}",
                asset.path,
                "run the command again: it is checked anew",
                ExitCode.BLOCKED,
            )


def _look(path: Path, cache: HashCache) -> Tuple[Optional[Content], str]:
    try:
        return content_of(path, cache), ""
    except BadAsset as error:
        return None, str(error)
    except OSError as error:
        return None, f"it cannot be read: {error.strerror or error}"


def op_asset(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """What lies at `path`: its fingerprint and size, or in `problem` why it has none."""
    path = Path(os.path.abspath(os.path.expanduser(args.text("path"))))
    found, why = _look(path, hashes(conversation.work))
    if found is None:
        return {"path": str(path), "sha256": None, "size": 0, "problem": why}
    return {"path": str(path), "sha256": found.fingerprint, "size": found.size, "problem": None}


def op_asset_begin(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Which files of an asset are `missing` here; `path` is where it lies, null until it is whole."""
    work, wanted = conversation.work, _wanted(args)
    place = _Place.of(work, wanted)
    if place.whole(hashes(work)):
        return {"path": str(place.path), "missing": [], "bytes": 0, "free": free_bytes(work.root)}
    missing = place.missing()
    # files of the same content are one upload
    begun = {file.sha256: place.begun(file) for file in missing}
    return {
        "path": None,
        "missing": [file.path for file in missing],
        "bytes": sum(file.size for file in missing) - sum(begun.values()),
        "free": free_bytes(work.root),
    }


def op_asset_file(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Takes one file of an asset; it goes on after the bytes of an upload that broke off."""
    conversation.lock.refuse_if_taken()
    work, path = conversation.work, args.text("path")
    file = Listed(path, args.size("size"), args.digest("sha256"))
    if not is_safe_relative(path):
        raise _bad(args, f"{path!r:.120} is no plain relative path")
    part = _part(work, args.digest("asset"))
    incoming = _incoming(part, file.sha256)
    incoming.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sent = upload_archive(conversation, incoming, Archive(file.size, file.sha256))
    _settle(incoming, part / "tree" / path)
    return {"sent": sent}


def op_asset_files(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Takes several small files of an asset as one upload, one behind the other: a round trip each would take hours.

    `sha256` is that of all the bytes; what each file is, `asset_end` sees.
    """
    conversation.lock.refuse_if_taken()
    part, files = _part(conversation.work, args.digest("asset")), _listed(args)
    together = Archive(sum(file.size for file in files), args.digest("sha256"))
    incoming = _incoming(part, args.digest("sha256"))
    incoming.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sent = upload_archive(conversation, incoming, together)
    one = incoming.with_name("one")
    with incoming.open("rb") as stream:
        for file in files:
            one.write_bytes(stream.read(file.size))
            _settle(one, part / "tree" / file.path)
    incoming.unlink()
    return {"sent": sent}


def _settle(incoming: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with incoming.open("rb+") as stream:
        os.fchmod(stream.fileno(), 0o444)
        os.fsync(stream.fileno())
    os.utime(incoming, (_SETTLED, _SETTLED))
    incoming.replace(target)
    fsync_folder(target.parent)


def op_asset_end(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """All files are here: verified as a whole, read-only, and given its name. AgentError `asset` (exit 4)."""
    conversation.lock.refuse_if_taken()
    work, wanted = conversation.work, _wanted(args)
    place, cache = _Place.of(work, wanted), hashes(work)
    if place.whole(cache):
        return {"path": str(place.path)}
    tree = place.part / "tree"
    found, why = _look(tree / wanted.files[0].path if wanted.single else tree, cache)
    if found is None or found.fingerprint != wanted.fingerprint:
        remove_tree(place.part)
        raise AgentError(
            "asset",
            f"the asset did not arrive whole: {why or 'its files make up another one'}",
            str(place.folder),
            "run the command again",
            ExitCode.TRANSPORT,
        )
    for folder in [*sorted(parents_of(file.path for file in wanted.files), reverse=True), "."]:
        fsync_folder(tree / folder)
        (tree / folder).chmod(0o555)
    if place.folder.exists():
        # damaged there; what a run has open stays with it
        aside = place.part / "damaged"
        place.folder.rename(aside)
    # a folder must be writable to be moved
    tree.chmod(0o755)
    tree.rename(place.folder)
    place.folder.chmod(0o555)
    fsync_folder(place.folder.parent)
    remove_tree(place.part)
    work.record("asset", sha256=wanted.fingerprint, bytes=wanted.size)
    return {"path": str(place.path)}


@dataclass(frozen=True)
class _Place:
    """Where an asset lies, or will lie: `folder` once it is whole, `part` while it comes."""

    wanted: Content
    folder: Path
    part: Path

    @classmethod
    def of(cls, work: WorkDir, wanted: Content) -> "_Place":
        return cls(wanted, work.assets / wanted.fingerprint, _part(work, wanted.fingerprint))

    @property
    def path(self) -> Path:
        """What the trainer is given: the folder, or the one file in it."""
        return self.folder / self.wanted.files[0].path if self.wanted.single else self.folder

    def whole(self, cache: HashCache) -> bool:
        found, _ = _look(self.path, cache)
        return found is not None and found.fingerprint == self.wanted.fingerprint

    def missing(self) -> List[Listed]:
        """What has not come yet. All of it is hashed at the end, so that size is enough here."""
        return [file for file in self.wanted.files if _size(self.part / "tree" / file.path) != file.size]

    def begun(self, file: Listed) -> int:
        """Bytes of it that an upload brought before it broke off; the next one goes on after them."""
        there = _size(_incoming(self.part, file.sha256))
        return there if 0 <= there <= file.size else 0


def _incoming(part: Path, sha256: str) -> Path:
    return part / "incoming" / sha256


def _part(work: WorkDir, fingerprint: str) -> Path:
    return work.assets / f"{fingerprint}.part"


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1


def _wanted(args: Arguments) -> Content:
    """The content that the client announces; its fingerprint must be what its files make up."""
    files = _listed(args)
    wanted = Content(tuple(sorted(files, key=lambda file: file.path)), args.flag("single"))
    if wanted.single and (len(files) != 1 or "/" in files[0].path):
        raise _bad(args, "a single file has one name")
    if wanted.fingerprint != args.digest("asset"):
        raise _bad(args, "the files do not make up that asset")
    return wanted


def _listed(args: Arguments) -> List[Listed]:
    listed = args.values.get("files")
    if not isinstance(listed, list) or not listed:
        raise _bad(args, "files must be a list of path, size and sha256")
    files = []
    for item in listed:
        one = Arguments(f"{args.op} files", item if isinstance(item, dict) else {})
        files.append(Listed(one.text("path"), one.size("size"), one.digest("sha256")))
    paths = {file.path for file in files}
    for path in paths:
        if not is_safe_relative(path) or any(part.startswith(".") for part in path.split("/")):
            raise _bad(args, f"{path!r:.120} is no plain relative path")
    if len(paths) != len(files) or paths & parents_of(paths):
        raise _bad(args, "a path stands there twice, or as a file and a folder")
    return files


def _bad(args: Arguments, what: str) -> AgentError:
    return AgentError("request", what, f"request {args.op}", "see docs/agent-protocol.md", ExitCode.USAGE)
