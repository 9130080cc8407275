"""The agent with its bytecode: compiling it takes half of the time in which an agent starts.

`agent/<sha256>.<tag of this Python>.<sha256 of this very file>.pyz` is made by the first agent that a Python runs; the
bootstrap starts it from then on, if it is what its name says.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import marshal
import sys
import zipfile
from pathlib import Path

from .files import atomic_write

_UNCHECKED = b"\x01\0\0\0" + bytes(8)
"""PEP 552: bytecode by the hash of its source, which nobody is to check: the whole file's name is its hash."""


def keep_compiled(agent_file: Path) -> None:
    """Makes the compiled agent beside `agent_file`, unless it is there or `agent_file` is one."""
    tag = str(sys.implementation.cache_tag)
    if "." in agent_file.stem or any(agent_file.parent.glob(f"{agent_file.stem}.{tag}.*.pyz")):
        return
    data = _compiled(agent_file)
    named = agent_file.with_name(f"{agent_file.stem}.{tag}.{hashlib.sha256(data).hexdigest()}.pyz")
    # whoever starts it compares its hash first
    atomic_write(named, data, durable=False)


def _compiled(agent_file: Path) -> bytes:
    """The same zip application, with bytecode beside each source; another Python takes the source."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(agent_file) as sources, zipfile.ZipFile(buffer, "w") as both:
        for info in sources.infolist():
            source = sources.read(info)
            code = marshal.dumps(compile(source, f"{agent_file}/{info.filename}", "exec", dont_inherit=True))
            both.writestr(info, source)
            both.writestr(
                zipfile.ZipInfo(f"{info.filename}c", info.date_time), importlib.util.MAGIC_NUMBER + _UNCHECKED + code
            )
    return buffer.getvalue()
