"""Managed environments as they lie in `envs/<digest>`: their names, what shows that one is whole, and who uses it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from .errors import AgentError, ExitCode
from .files import digest_of, read_json
from .leases import leases
from .lockfile import Lock
from .pythons import ask_python
from .runs import RunFolder
from .workdir import WorkDir

MARKER = "environment.json"
_BASE = """
import glob, json, os, platform, sys, sysconfig
missing, pip = [], []
try:
    import venv
except ImportError:
    missing.append("venv")
try:
    import ensurepip
    # Debian keeps the wheels elsewhere
    places = [os.path.join(os.path.dirname(ensurepip.__file__), "_bundled"), sysconfig.get_config_var("WHEEL_PKG_DIR"),
              "/usr/share/python-wheels"]
    pip = [path for place in places if place for path in glob.glob(os.path.join(place, "pip-*.whl"))]
except ImportError:
    pass
if not pip:
    missing.append("ensurepip")
base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
print(json.dumps([base, platform.python_version(), sys.implementation.cache_tag, sysconfig.get_platform(), pip[:1],
                  missing]))
"""


@dataclass(frozen=True)
class Base:
    """The host's Python that an environment is made of. `path`: its real executable; `tag`: as `cpython-312`;
    `platform`: as `linux-x86_64`; `pip`: the wheel of pip that comes with it; `missing`: modules that it needs for an
    environment and has not."""

    path: str
    version: str
    tag: str
    platform: str
    pip: List[str]
    missing: List[str]

    @classmethod
    def ask(cls, python: str) -> "Base":
        return cls(*ask_python([python, "-I", "-c", _BASE], python, None, "say what it is"))

    @property
    def minor(self) -> str:
        """`3.12`"""
        return ".".join(self.version.split(".")[:2])

    def describe(self) -> str:
        return f"Python {self.version} on {self.platform}"

    def name_of(self, lock: Lock) -> str:
        """The digest by which an environment of this lock is called: another Python, another environment."""
        parts = (self.path, self.version, self.tag, self.platform)
        return digest_of({"lock": lock.digest, "python": parts})


@dataclass(frozen=True)
class ManagedEnvironment:
    """One that is whole: `marker` is its environment.json, which was written last."""

    folder: Path
    marker: Dict[str, Any]

    @classmethod
    def find(cls, work: WorkDir, digest: str) -> "Optional[ManagedEnvironment]":
        folder = work.envs / digest
        marker = read_json(folder / MARKER)
        return None if marker is None or marker.get("digest") != digest else cls(folder, marker)

    @classmethod
    def of_python(cls, work: WorkDir, python: str) -> "Optional[ManagedEnvironment]":
        """Whose interpreter that is; None where it is no managed one's. AgentError `environment` where it is gone."""
        digest = digest_in(work, python)
        if digest is None:
            return None
        found = cls.find(work, digest)
        if found is None or not os.path.exists(python):
            raise AgentError(
                "environment",
                f"the environment {digest[:12]} is not on this host any more, or not whole",
                str(work.envs),
                "dflash-ops deploy builds it anew; a run goes on in a new one by: "
                "dflash-ops resume RUN --release --playbook NAME",
                ExitCode.BLOCKED,
            )
        return found

    @property
    def digest(self) -> str:
        return self.folder.name

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def complaints(self) -> List[str]:
        """What `pip check` said of it."""
        return [str(line) for line in self.marker.get("complaints") or []]

    def damage(self) -> Optional[str]:
        """Why it is not what was built any more; None when it is. Files are told by size and time, not read."""
        if not os.path.exists(self.python):
            return f"the Python that it was made of, {self.marker.get('base')}, is gone"
        return None if seal_of(self.folder) == self.marker.get("seal") else "its files were changed after it was built"


def users_of(work: WorkDir, digest: str) -> List[str]:
    """Runs that go on in that environment."""
    held = [RunFolder(work.runs / lease.owner) for lease in leases(work) if lease.kind == "run"]
    return [run.run for run in held if digest_in(work, str(run.record().get("python"))) == digest]


def digest_in(work: WorkDir, python: str) -> Optional[str]:
    """The name of the environment that `python` is a path in; None where it lies elsewhere."""
    try:
        parts = Path(python).relative_to(work.envs).parts
    except ValueError:
        return None
    return parts[0] if len(parts) == 3 and len(parts[0]) == 64 else None


def seal_of(root: Path) -> str:
    """sha256 over path, size and modification time of all that lies there.

    Bytecode is left out: whoever starts its Python by hand may add some, and it changes nothing.
    """
    lines = []
    # for each of tens of thousands of files, several times a deploy: relative names are put together, not looked for
    folders = [(str(root), "")]
    while folders:
        folder, prefix = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_symlink():
                    lines.append(f"{name}\0{os.readlink(entry.path)}\n")
                elif entry.is_dir():
                    if entry.name != "__pycache__":
                        folders.append((entry.path, f"{name}/"))
                elif name != MARKER:
                    status = entry.stat()
                    lines.append(f"{name}\0{status.st_size} {status.st_mtime_ns}\n")
    return hashlib.sha256("".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()
