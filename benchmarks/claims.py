"""Which measurements still speak for the code: `python benchmarks/claims.py` lists those whose sources have changed.

Each folder of results holds a `claim.json`: date, GPU, torch, command, figures, `sources` (folders and files of this
project that decide what CUDA does: docs/decisions/0004)
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

_SHOWN = 3


def sources_digest(sources: list[str], root: Path = ROOT) -> str:
    """sha256 over path and content of every Python file of `sources`: folders, and single files."""
    digest = hashlib.sha256()
    for path in sorted(file for source in sources for file in _python_files(root / source)):
        name = path.relative_to(root).as_posix()
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _python_files(source: Path) -> list[Path]:
    return [source] if source.is_file() else list(source.rglob("*.py"))


def stale_claims(results: Path = RESULTS, root: Path = ROOT) -> list[str]:
    """One line for each claim whose sources are no longer what was measured."""
    found = []
    for path in sorted(results.glob("*/claim.json")):
        claim = json.loads(path.read_text())
        if sources_digest(claim["sources"], root) != claim["digest"]:
            first, more = claim["sources"][:_SHOWN], len(claim["sources"]) - _SHOWN
            changed = ", ".join(first) + (f" and {more} more" if more > 0 else "")
            found.append(f"{path.parent.name}: measured {claim['date']} on {claim['gpu']}; changed since: {changed}")
    return found


def main() -> None:
    """Prints the list; always exits 0."""
    stale = stale_claims()
    for line in stale:
        print(f"stale: {line}")
    print(f"{len(stale)} of {len(list(RESULTS.glob('*/claim.json')))} measurements are stale")


if __name__ == "__main__":
    main()
