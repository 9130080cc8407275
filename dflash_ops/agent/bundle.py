"""Packs this package into the zip application that is sent to the host."""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from pathlib import Path

PACKAGE = "dflash_agent"
_ENTRY = f"import sys\nfrom {PACKAGE}.__main__ import main\nsys.exit(main())\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)


@functools.lru_cache(maxsize=1)
def agent_bundle() -> "tuple[bytes, str]":
    """The zip application and its sha256 in hex; the same sources give the same bytes."""
    here = Path(__file__).parent
    files = {f"{PACKAGE}/{path.name}": path.read_bytes() for path in here.glob("*.py") if path.name != "bundle.py"}
    files["__main__.py"] = _ENTRY.encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            info.external_attr = 0o644 << 16
            archive.writestr(info, files[name])
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest()
