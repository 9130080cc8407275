"""Whether a run failed for want of room on the disk: what it said, and what was free when it ended."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Optional

from .disk import free_bytes_near

FULL = "disk_full"
_WORDS = re.compile(r"(?:No space left on device|Disk quota exceeded)(?:: '(/[^'\n]+)')?")
FULL_BYTES = 1 << 20
"""Less is a full disk."""
_LONGEST_QUOTE = 200


def full_disk(place: Path, free: Optional[int], log: List[str]) -> Optional[Dict[str, Any]]:
    """exit.json's reason for a failed run; None where nothing tells of a full disk.

    `place`: where it writes; `free`: bytes there when it ended; `log`: the end of what it said.
    """
    said = next((line for line in reversed(log) if _WORDS.search(line)), None)
    if said is None:
        if free is None or free >= FULL_BYTES:
            return None
        what = f"the disk of {place} was full when it ended: {free} bytes free"
    else:
        found = _WORDS.search(said)
        named = found.group(1) if found else None
        if named is not None:
            place, free = Path(named), free_bytes_near(Path(named))
        quote = said.strip()[:_LONGEST_QUOTE]
        what = f"it found no room on the disk ({quote}): {'?' if free is None else free} bytes free for {place}"
    return {"kind": FULL, "what": what, "path": str(place), "free_bytes": free}
