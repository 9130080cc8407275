"""What killed agents left half-made goes when the next one takes the lock; what others are making stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.agent.client import Agent

DIGEST, OTHER = "0" * 64, "1" * 64


def test_leftovers_of_the_dead_go_and_files_of_the_living_stay(work: Path) -> None:
    with Agent(work) as agent:
        agent.call("facts")
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead, alive = int(gone.stdout), os.getpid()
    (work / "runs" / "r").mkdir()
    (work / "releases" / DIGEST).mkdir()
    left = [
        f"agent/{DIGEST}.pyz.{dead}",
        f"releases/{DIGEST}.part/file",
        f"releases/{DIGEST}.tgz.part",
        f"releases/{OTHER}.tgz.piece",
        f".current.{dead}",
        f"verdicts/.{DIGEST}.json.{dead}-0a1b2c3d.tmp",
        f"runs/r/.stop.json.{dead}-0a1b2c3d.tmp",
        f"scratch/20260101-000000-0a1b-{dead}/out/check.json",
    ]
    # of a release that is not there: its upload goes on where it broke off
    kept = [f"releases/{OTHER}.tgz.part"]
    kept += [f"scratch/20260101-000000-0a1b-{alive}/out/check.json"]
    kept += [f"agent/{DIGEST}.pyz.{alive}", f"runs/r/.stop.json.{alive}-0a1b2c3d.tmp", "runs/r/run.json.tmp"]
    for name in left + kept:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("half")
    with Agent(work) as agent:
        agent.call("runs")
        assert all((work / name).exists() for name in left), "a reader changes nothing"
        agent.call("lock", owner="somebody@here", command="deploy")
        assert [name for name in left if (work / name).exists()] == []
        assert [path.name for path in (work / "scratch").iterdir()] == [f"20260101-000000-0a1b-{alive}"]
        assert all((work / name).exists() for name in kept)
