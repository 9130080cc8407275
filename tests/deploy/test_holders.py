"""Who holds a host while a deploy is at work there, and `dflash-ops unlock`."""

from __future__ import annotations

from tests.commands import Desk, eventually
from tests.deploy.test_deploy import jobs_of


def test_a_deploy_at_its_canary_is_seen_and_can_be_ended(desk: Desk) -> None:
    desk.write_playbook("hanging", faults=("worker-hangs",), workload={"canary_timeout_s": 600})
    work = desk.folder / "work"
    with desk.started("deploy", "--playbook", "hanging") as deploying:
        deploying.until_event("canary")
        eventually(lambda: bool(list(work.glob("canary/*/running.json"))))
        (marker,) = work.glob("canary/*/running.json")
        canary = marker.parent.name
        eventually(lambda: bool(jobs_of(canary)))

        seen = desk.type("status", "--host", "box")
        assert seen.code == 0
        assert "holds this host with `deploy`" in seen.err
        assert f"canary {canary} (playbook hanging) has cpu" in seen.err
        assert "nothing has run on box yet" in seen.err

        refused = desk.run("unlock")
        assert refused.code == 9
        (lock,) = refused.named("lock")
        assert (lock["command"], lock["agent_lives"]) == ("deploy", True)
        assert refused.named("lease")[0]["owner"] == canary
        assert "unlock --force" in refused.error["fix"]
        assert jobs_of(canary)

        taken = desk.run("unlock", "--force")
        assert taken.code == 0, taken.out
        assert taken.result["agent"] == "ended"
        assert jobs_of(canary) == []
        (error,) = [event for event in deploying.rest() if event["event"] == "error"]
        assert error["kind"] == "lock_lost"
        assert "with `unlock`" in error["what"]
        assert deploying.code == 9
    again = desk.type("unlock", "--host", "box")
    assert again.code == 0
    assert "nobody holds the host" in again.err
