"""Which files of a source folder go into a release."""

from __future__ import annotations

import difflib
import os
import stat
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dflash_ops.release.errors import ReleaseError
from dflash_ops.release.manifest import SourceKind, SourceRecord, TreeFile
from dflash_ops.release.refuse import refuse_content, refuse_name, refuse_size

# Variables that a git hook sets and that would point git at another repository.
_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")
_GITLINK = b"160000"


@dataclass(frozen=True)
class Source:
    """A folder to build from.

    In git, the files that git tracks below `path` go in, as they are in the working tree; `include` (globs or
    folders, relative to `path`) adds files that git does not track. `bundled` says that `path` is a folder of
    an installed package, where there is no git: all its files go in, but no bytecode.
    """

    path: Path
    include: tuple[str, ...] = ()
    bundled: bool = False


def collect(source: Source) -> tuple[dict[str, TreeFile], SourceRecord]:
    """The tree by path inside the release, and its record.

    A Python package (it has `__init__.py` or `__main__.py`) keeps its own folder name, so that `python -m NAME`
    works from the release's root; of any other folder the content is the root. Raises ReleaseError.
    """
    root = source.path.resolve()
    if not root.is_dir():
        raise ReleaseError("there is no such folder", str(source.path), "name the source tree's folder")
    named = _named(root, source.include)
    commit: str | None = None
    dirty: set[str] = set()
    if source.bundled:
        kind = SourceKind.BUNDLED
        chosen = set(_walk(root, root))
    elif _in_git(root):
        kind = SourceKind.GIT
        tracked = _tracked(root, named)
        commit = _commit(root)
        chosen = {path for path in tracked if os.path.lexists(root / path)}
        changed = _changed(root) if commit else tracked
        # a sparse checkout lacks tracked files without git calling them changed
        dirty = changed | (tracked - chosen) | (named - tracked)
        if not tracked and not named:
            raise ReleaseError(
                "git tracks no file in this folder",
                str(source.path),
                "`git add` what the release needs, or name it in `include`",
            )
    else:
        kind = SourceKind.NAMED
        chosen = set()
        if not named:
            raise ReleaseError(
                "the folder is neither in git nor part of an installed package",
                str(source.path),
                "`git init` and `git add` there, or name the files in `include`",
            )
    prefix = f"{root.name}/" if _is_package(root) else ""
    tree: dict[str, TreeFile] = {}
    for path in sorted(path for path in chosen | named if not _is_bytecode(path)):
        tree[prefix + path] = _read(root, path)
    if not tree:
        raise ReleaseError("the folder holds no file for a release", str(source.path), "name another folder")
    return tree, SourceRecord(kind, commit, tuple(sorted(prefix + path for path in dirty)))


def left_out(source: Source) -> tuple[str, ...]:
    """The Python files below `source.path` that look as if they belonged to it, and that no release gets.

    Git neither tracks nor ignores them, and `include` does not name them: a new module that nobody has added yet.
    """
    root = source.path.resolve()
    if source.bundled or not _in_git(root):
        return ()
    listed = _git_output(root, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py").split(b"\0")
    return tuple(sorted({os.fsdecode(name) for name in listed if name} - _named(root, source.include)))


def _is_package(root: Path) -> bool:
    return (root / "__init__.py").is_file() or (root / "__main__.py").is_file()


def _is_bytecode(path: str) -> bool:
    return path.endswith(".pyc") or "__pycache__" in path.split("/")


def _read(root: Path, path: str) -> TreeFile:
    refuse_name(path)
    place = root
    for part in PurePosixPath(path).parts:
        place = place / part
        if place.is_symlink():
            raise ReleaseError(
                "is a symbolic link; a release holds files only",
                place.relative_to(root).as_posix(),
                f"put a copy of {place.readlink()} there, or take the link out of git",
            )
    info = place.lstat()
    if not stat.S_ISREG(info.st_mode):
        raise ReleaseError("is no regular file", path, "leave it out of the release")
    refuse_size(path, info.st_size)
    try:
        data = place.read_bytes()
    except OSError as error:
        raise ReleaseError(f"cannot be read: {error.strerror}", path, "make it readable, or leave it out") from error
    refuse_content(path, data)
    return TreeFile(data, 0o755 if info.st_mode & stat.S_IXUSR else 0o644)


def _walk(root: Path, start: Path) -> Iterable[str]:
    """Every file and link below `start`, relative to `root`; links are not followed. Git's own folder and
    bytecode are never source."""
    for folder, subfolders, names in os.walk(start):
        for name in list(subfolders):
            if name in {".git", "__pycache__"}:
                subfolders.remove(name)
            elif (Path(folder) / name).is_symlink():
                names.append(name)
        for name in names:
            path = (Path(folder) / name).relative_to(root).as_posix()
            if not _is_bytecode(path):
                yield path


def _named(root: Path, include: Iterable[str]) -> set[str]:
    """What the globs of `include` name. A folder stands for all files below it."""
    named: set[str] = set()
    for pattern in include:
        pure = PurePosixPath(pattern)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise ReleaseError(
                f"include: {pattern!r} does not stay inside the source folder",
                str(root),
                "write it relative to the source folder, without `..`",
            )
        found: set[str] = set()
        for match in root.glob(pattern):
            path = match.relative_to(root).as_posix()
            if ".git" in path.split("/") or _is_bytecode(path):
                continue
            if match.is_dir() and not match.is_symlink():
                found.update(_walk(root, match))
            else:
                found.add(path)
        if not found:
            raise ReleaseError(f"include: {pattern!r} names no file", str(root), _nearest(root, pattern))
        named |= found
    return named


def _nearest(root: Path, pattern: str) -> str:
    close = difflib.get_close_matches(pattern, sorted(_walk(root, root)), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else "correct the pattern, or take it out of `include`"


def _environment() -> Mapping[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in _GIT_VARIABLES}
    return {**kept, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["git", *arguments],
        cwd=root,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )


def _git_output(root: Path, *arguments: str) -> bytes:
    done = _git(root, *arguments)
    if done.returncode != 0:
        lines = os.fsdecode(done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        raise ReleaseError(f"git {arguments[0]} failed: {lines[0]}", str(root), "make `git status` work in that folder")
    return done.stdout


def _in_git(root: Path) -> bool:
    try:
        done = _git(root, "rev-parse", "--is-inside-work-tree")
    except FileNotFoundError:
        return False
    if done.returncode == 0:
        return done.stdout.strip() == b"true"
    # A repository that git refuses to read (owned by someone else, damaged) must not pass for no repository.
    if b"not a git repository" not in done.stderr:
        _git_output(root, "rev-parse", "--is-inside-work-tree")
    return False


def _tracked(root: Path, named: set[str]) -> set[str]:
    tracked: set[str] = set()
    for entry in _git_output(root, "ls-files", "--stage", "-z", "--", ".").split(b"\0"):
        if not entry:
            continue
        head, _, name = entry.partition(b"\t")
        path = os.fsdecode(name)
        if not head.startswith(_GITLINK):
            tracked.add(path)
        elif not any(other.startswith(f"{path}/") for other in named):
            raise ReleaseError(
                "is a git submodule; git does not track its files here",
                path,
                f"name what the release needs of it in `include` (for example '{path}/**/*.py')",
            )
    return tracked


def _commit(root: Path) -> str | None:
    """HEAD's commit; None before the first one."""
    head = _git(root, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    return os.fsdecode(head.stdout.strip()) if head.returncode == 0 else None


def _changed(root: Path) -> set[str]:
    """The paths below `root` that differ from HEAD, in the index or in the working tree."""
    listed = _git_output(
        root, "diff", "--name-only", "--relative", "--no-renames", "--no-ext-diff", "-z", "HEAD", "--", "."
    )
    return {os.fsdecode(name) for name in listed.split(b"\0") if name}
