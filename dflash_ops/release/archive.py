"""One tree, one archive: the same bytes wherever, whenever and by whomever it is packed."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping

from dflash_ops.release.manifest import MANIFEST, Manifest, TreeFile


def pack(tree: Mapping[str, TreeFile], manifest: Manifest) -> bytes:
    """A gzip'ed tar: `manifest.json` first, then the files in the order of their paths. Owner, group and times
    are 0, and there are no entries for folders."""
    buffer = io.BytesIO()
    # GzipFile and not tarfile's "w:gz", which writes the time and the file's name into the header
    with (
        gzip.GzipFile(filename="", fileobj=buffer, mode="wb", compresslevel=6, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar,
    ):
        _add(tar, MANIFEST, TreeFile(manifest.to_bytes(), 0o644))
        for path in sorted(tree):
            _add(tar, path, tree[path])
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, path: str, file: TreeFile) -> None:
    info = tarfile.TarInfo(path)  # uid, gid, mtime 0 and no owner names are its defaults
    info.size = len(file.data)
    info.mode = file.mode
    tar.addfile(info, io.BytesIO(file.data))
