from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from claims import sources_digest, stale_claims


def test_a_claim_is_stale_once_its_sources_change(tmp_path: Path) -> None:
    source = tmp_path / "trainer" / "a.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    single = tmp_path / "devices.py"
    single.write_text("")
    sources = ["trainer", "devices.py"]
    claim = {"date": "2026-11-29", "gpu": "G", "sources": sources, "digest": sources_digest(sources, tmp_path)}
    results = tmp_path / "results"
    (results / "one").mkdir(parents=True)
    (results / "one" / "claim.json").write_text(json.dumps(claim))
    assert stale_claims(results, tmp_path) == []
    source.write_text("x = 2\n")
    assert stale_claims(results, tmp_path) == ["one: measured 2026-11-29 on G; changed since: trainer, devices.py"]
    source.write_text("x = 1\n")
    (source.parent / "b.py").write_text("")
    assert len(stale_claims(results, tmp_path)) == 1
    (source.parent / "b.py").unlink()
    assert stale_claims(results, tmp_path) == []
    single.write_text("y = 1\n")
    assert len(stale_claims(results, tmp_path)) == 1
