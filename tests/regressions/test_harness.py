"""A canary is run here as a host runs it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.regressions.harness import Canary, run_canary

SETTINGS = {"workload": {"canary_timeout_s": 1}}


def test_a_process_that_broke_is_followed_by_one_more(tmp_path: Path) -> None:
    ran: list[Path] = []

    def run(root: Path, arguments: list[str], log: Path, limit_s: int) -> int:
        out = Path(arguments[arguments.index("--out") + 1])
        ran.append(out)
        log.write_text(f"process {len(ran)}")
        broken = {"outcome": "inconclusive", "summary": "lost", "again": "lost"}
        evidence = broken if len(ran) % 2 else {"outcome": "pass", "summary": "proven"}
        (out / "evidence.json").write_text(json.dumps({**evidence, "checks": []}))
        return 7 if len(ran) % 2 else 0

    canary = run_canary(run, tmp_path, SETTINGS, tmp_path)
    assert (canary.code, canary.message, canary.log, canary.broke) == (0, "proven", "process 2", "lost")
    assert not canary.stops
    assert len(set(ran)) == 2


def test_refused_settings_are_no_verdict() -> None:
    refused, failed = (Canary(code, None, "", 1.0) for code in (2, 6))
    assert (refused.stops, refused.refused, failed.refused) == (True, True, False)
