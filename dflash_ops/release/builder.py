"""Source plus patches becomes a release."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.release.apply import apply_patch
from dflash_ops.release.archive import pack
from dflash_ops.release.errors import ReleaseError
from dflash_ops.release.manifest import MANIFEST, Manifest, PatchRecord, TreeFile, make_manifest
from dflash_ops.release.refuse import refuse_content, refuse_name, refuse_size
from dflash_ops.release.source import Source, collect


@dataclass(frozen=True)
class Release:
    """`digest` is the sha256 (hex) of the content; `archive` is what is staged; `tree` holds the same files,
    unpacked, with `manifest.json`."""

    digest: str
    manifest: Manifest
    archive: bytes
    tree: Path


def build(source: Source, patches: Sequence[Path], *, settings: Mapping[str, object], out: Path) -> Release:
    """Builds a release from `source` and the `patches`, applied in their order, into the folder `out`.

    `out` must be absent or empty; it appears whole or not at all. Raises ReleaseError: a secret, weights, a
    link, a name in `include` that matches nothing, or a patch that does not apply exactly (PatchError).
    """
    _refuse_used(out)
    tree, record = collect(source)
    applied: list[PatchRecord] = []
    for patch in patches:
        data = _read_patch(patch)
        patched = apply_patch(tree, data, patch.name)
        for path, file in patched.items():
            if file != tree.get(path):
                refuse_name(path)
                refuse_size(path, len(file.data))
                refuse_content(path, file.data)
        tree = patched
        applied.append(PatchRecord(patch.name, hashlib.sha256(data).hexdigest()))
    if MANIFEST in tree:
        raise ReleaseError("is the name of the release's own manifest", MANIFEST, "rename that file of the source tree")
    manifest = make_manifest(tree, record, applied, settings)
    _write_tree(tree, manifest, out)
    return Release(manifest.digest, manifest, pack(tree, manifest), out)


def _read_patch(patch: Path) -> bytes:
    try:
        return patch.read_bytes()
    except OSError as error:
        raise ReleaseError(
            f"the patch cannot be read: {error.strerror}", str(patch), "correct the playbook's list of patches"
        ) from error


def _refuse_used(out: Path) -> None:
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ReleaseError("exists and is not an empty folder", str(out), "name a new folder to build into")


def _write_tree(tree: Mapping[str, TreeFile], manifest: Manifest, out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            root = Path(scratch) / "tree"
            root.mkdir()
            for path, file in [*tree.items(), (MANIFEST, TreeFile(manifest.to_bytes(), 0o644))]:
                place = root / path
                place.parent.mkdir(parents=True, exist_ok=True)
                _write_file(place, file)
            root.replace(out)
    except OSError as error:
        raise ReleaseError(
            f"the release cannot be written: {error.strerror}", str(out), "free space there, or name another folder"
        ) from error


def _write_file(place: Path, file: TreeFile) -> None:
    with place.open("wb") as stream:
        stream.write(file.data)
        os.fchmod(stream.fileno(), file.mode)
