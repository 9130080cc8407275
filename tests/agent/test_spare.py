"""A full disk: the commands that lead out of it work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.client import Agent, AgentFailed


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(b"f" * 4096):
                pass
        except OSError:
            pass


@pytest.mark.parametrize("small_disk", ["20m"], indirect=True)
def test_what_makes_room_works_on_a_full_disk(small_disk: Path) -> None:
    with Agent(small_disk) as agent:
        agent.call("facts")
        old = small_disk / "cache" / "prepared" / "old"
        old.mkdir()
        (old / "prepare.json").write_text("{}")
        (old / "data").write_bytes(b"d" * 1_000_000)
        fill(small_disk)
        with pytest.raises(AgentFailed):
            agent.call("stage", digest="0" * 64, size=10_000, upload=b"x" * 10_000)
        agent.call("lock", owner="me@desk", command="prune")
        limits = {"keep_runs": 0, "keep_releases": 0, "keep_environments": 0, "keep_prepared": 0, "keep_assets": 0}
        found = agent.call("prune", collected=None, **limits).result["items"]
    assert [item["name"] for item in found if item["fate"] == "goes"] == ["old"]
    assert not old.exists()
