"""Staging a release (unpacked, verified, read-only) and making it the current one."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from .arguments import Arguments
from .conversation import Conversation
from .errors import AgentError, ClientGone, ExitCode
from .files import CHUNK, fsync_folder, remove_tree, sha256_file
from .manifest import NAME, BadTree, Entry, parents_of, parse_manifest, tree_digest
from .pushed import Piece, append_piece, begin_pieces
from .uploads import Archive, check_space, disk_full, upload_archive
from .workdir import WorkDir

if TYPE_CHECKING:
    import tarfile

_MANIFEST_LIMIT = 64 * 1024 * 1024
_UNFINISHED_S = 86400.0


def find_release(work: WorkDir, digest: str) -> Path:
    """The folder of a staged release."""
    path = work.release(digest)
    if not path.is_dir():
        raise AgentError(
            "unknown_release",
            f"release {digest[:12]}… is not on this host",
            "releases of the host",
            "stage it first: dflash-ops deploy",
            ExitCode.USAGE,
        )
    return path


def staged_releases(work: WorkDir) -> List[str]:
    """Digests of the releases on this host, whole ones only."""
    return sorted(path.name for path in work.releases.iterdir() if path.is_dir() and path.name.isalnum())


def damage(path: Path, digest: str) -> Optional[str]:
    """Why the tree is not the release `digest` any more; None when it is."""
    try:
        actual = tree_digest(path)
    except BadTree as error:
        return str(error)
    return None if actual == digest else "its files were changed after they were staged"


def op_stage(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Takes what is missing of a release's archive, and makes the release of it, unless that is here already."""
    work, digest, wanted = conversation.work, args.digest(), Archive(args.size("size"), args.optional_digest("sha256"))
    conversation.lock.refuse_if_taken()
    release = work.release(digest)
    if release.is_dir() and damage(release, digest) is None:
        conversation.event("need", **{"from": wanted.size, "bytes": 0})
        return {"sent": False, "digest": digest}
    clear_unfinished(work.releases)
    sent = _receive(conversation, digest, wanted)
    work.record("stage", release=digest, bytes=sent)
    return {"sent": sent > 0, "digest": digest}


def op_archive_begin(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """How much of an archive has come in pieces, and where the next one is to be put."""
    work, digest = conversation.work, args.digest()
    conversation.lock.refuse_if_taken()
    piece = _piece(work, digest)
    # `pct push` would write through a link
    piece.unlink(missing_ok=True)
    there, sha256 = begin_pieces(_arriving(work, digest), args.size("size"))
    return {"from": there, "sha256": sha256, "piece": str(piece)}


def op_archive_piece(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """Takes the piece that was put beside: the next bytes of the archive that `stage` will find here."""
    work, digest = conversation.work, args.digest()
    conversation.lock.refuse_if_taken()
    piece = Piece(_piece(work, digest), args.size("from"), args.size("size"), args.digest("sha256"))
    return {"from": append_piece(_arriving(work, digest), piece)}


def _arriving(work: WorkDir, digest: str) -> Path:
    """The archive while it comes."""
    return work.releases / f"{digest}.tgz.part"


def _piece(work: WorkDir, digest: str) -> Path:
    return work.releases / f"{digest}.tgz.piece"


def clear_unfinished(releases: Path) -> None:
    """Removes what stagings that nobody took up again for a day have left."""
    for path in releases.glob("*.part"):
        if time.time() - path.lstat().st_mtime > _UNFINISHED_S:
            remove_tree(path)


def _receive(conversation: Conversation, digest: str, wanted: Archive) -> int:
    """Archive to `<digest>.part`, and that to its name; the bytes that came over the wire.

    Where the client is gone in the middle, its bytes stay in `<digest>.tgz.part` and the next upload goes on there.
    """
    import tarfile
    import zlib

    release = conversation.work.release(digest)
    part, arriving = release.with_name(f"{digest}.part"), _arriving(conversation.work, digest)
    needed, sent, gone = wanted.size, 0, False
    try:
        remove_tree(part)
        sent = upload_archive(conversation, arriving, wanted)
        with tarfile.open(arriving, "r:gz") as tar:
            entries = _read_manifest(tar, digest)
            needed = sum(entry.size for entry in entries.values())
            check_space(release.parent, needed)
            _unpack(tar, entries, part)
        # a damaged tree of the same name makes room; processes that still use it keep their files
        if release.exists():
            aside = release.with_name(f"{digest}.damaged")
            remove_tree(aside)
            release.rename(aside)
            remove_tree(aside)
        part.rename(release)
        fsync_folder(release.parent)
    except ClientGone:
        gone = True
        raise
    except (tarfile.TarError, zlib.error, EOFError, BadTree) as error:
        raise _refused(digest, str(error)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(release.parent, needed) from error
        if error.errno is None:  # gzip.BadGzipFile
            raise _refused(digest, str(error)) from error
        raise
    finally:
        if not gone:
            remove_tree(part)
            arriving.unlink(missing_ok=True)
    return sent


def _refused(digest: str, why: str) -> AgentError:
    return AgentError(
        "archive",
        f"the archive is refused: {why}",
        f"release {digest[:12]}…",
        "build and send it again",
        ExitCode.REFUSED,
    )


def _read_manifest(tar: tarfile.TarFile, digest: str) -> Dict[str, Entry]:
    for member in tar:
        if member.name == NAME:
            file = tar.extractfile(member) if member.isreg() and member.size <= _MANIFEST_LIMIT else None
            if file is None:
                raise BadTree(f"{NAME} is not a regular file of a sensible size")
            return parse_manifest(file.read(), digest)
    raise BadTree(f"there is no {NAME} at its root")


def _unpack(tar: tarfile.TarFile, entries: Dict[str, Entry], part: Path) -> None:
    """Writes exactly the listed files, each verified, durable and read-only."""
    folders = parents_of(entries)
    part.mkdir(mode=0o700)
    for folder in sorted(folders):
        (part / folder).mkdir(mode=0o700)
    missing = set(entries)
    seen_manifest = False
    for member in tar:
        if member.isdir() and member.name.rstrip("/") in folders:
            continue
        if member.name == NAME and not seen_manifest:
            seen_manifest = True
            _write_file(tar, member, part / NAME, 0o444)
            continue
        if not member.isreg():
            raise BadTree(f"{member.name!r} is not a regular file")
        if member.name not in missing:
            raise BadTree(f"{member.name!r} is not in {NAME}, or is there twice")
        missing.discard(member.name)
        entry = entries[member.name]
        if member.size != entry.size or member.mode & 0o777 != entry.mode:
            raise BadTree(f"{entry.path}: size or mode is not what {NAME} says")
        target = part / entry.path
        _write_file(tar, member, target, entry.staged_mode)
        if sha256_file(target) != entry.sha256:
            raise BadTree(f"{entry.path}: sha256 is not what {NAME} says")
    if missing:
        raise BadTree(f"{min(missing)!r} is missing")
    for folder in [*sorted(folders, reverse=True), "."]:
        fsync_folder(part / folder)
        (part / folder).chmod(0o555)


def _write_file(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path, mode: int) -> None:
    source = tar.extractfile(member)
    if source is None:
        raise BadTree(f"{member.name!r} has no content")
    with path.open("xb") as file:
        shutil.copyfileobj(source, file, CHUNK)
        os.fchmod(file.fileno(), mode)
        file.flush()
        os.fsync(file.fileno())


def op_activate(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """`current` becomes this release, `previous` what was current before."""
    work, digest = conversation.work, args.digest()
    conversation.lock.refuse_if_taken()
    find_release(work, digest)
    before = linked(work.root / "current")
    if before != digest:
        make_current(work, digest)
        work.record("activate", release=digest, previous=before)
    return {"current": digest, "previous": linked(work.root / "previous")}


def make_current(work: WorkDir, digest: str) -> None:
    """`current` becomes this release, `previous` the one that was current."""
    before = linked(work.root / "current")
    if before is not None:
        _flip(work.root / "previous", before)
    _flip(work.root / "current", digest)
    fsync_folder(work.root)


def linked(link: Path) -> Optional[str]:
    return Path(os.readlink(link)).name if link.is_symlink() else None


def _flip(link: Path, digest: str) -> None:
    """rename(2) replaces a link in one step: nobody sees it missing."""
    new = link.with_name(f".{link.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(Path("releases") / digest)
    new.replace(link)
