"""What a person reads: each thing once, with what to type next."""

from __future__ import annotations

import pytest

from dflash_ops.deploy.amounts import number, sized
from dflash_ops.deploy.chain import Teller
from dflash_ops.deploy.endings import what_next
from dflash_ops.deploy.events import Event, Events
from dflash_ops.ui.human import HumanView

DIGEST = "4f465bfaaca0ea807d66b57229bb8f0d6bc7b4057ed271af1052e339f1bd61b3"


def shown(event: Event, capfd: pytest.CaptureFixture[str]) -> str:
    HumanView()(event)
    return capfd.readouterr().err


def error(**more: object) -> Event:
    return {"event": "error", "what": "no", "where": "box", "fix": "", "evidence": None, **more}


def test_what_looks_like_an_emojis_name_stays(capfd: pytest.CaptureFixture[str]) -> None:
    assert "e.yaml:100: no" in shown(error(what="e.yaml:100: no"), capfd)


def test_a_log_that_was_shown_is_not_shown_again_as_evidence(capfd: pytest.CaptureFixture[str]) -> None:
    view = HumanView()
    for line in ("Collecting tiny", "ERROR: no such wheel"):
        view({"event": "log", "source": "environment", "line": line})
    view({"event": "log", "source": "run", "line": "step 1"})
    # that of a run goes to standard output, which may be elsewhere
    view(error(evidence=["Collecting tiny", "ERROR: no such wheel", "step 1", "exit code 1"]))
    told = capfd.readouterr().err
    assert [told.count(line) for line in ("Collecting tiny", "ERROR: no such wheel", "step 1", "exit code 1")] == [
        1
    ] * 4


def test_new_modules_that_are_in_no_release_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    built: Event = {
        "event": "built", "release": DIGEST, "files": 2, "bytes": 9, "source": "/s", "commit": None, "dirty": [],
        "patches": [], "left_out": ["a.py", "b[red].py"],
    }  # fmt: skip
    assert "left out 2 files that git does not track: a.py, b[red].py; to ship them, git add them" in " ".join(
        shown(built, capfd).split()
    )
    assert "left out" not in shown({**built, "left_out": []}, capfd)


def test_names_that_are_offered_are_not_listed_twice(capfd: pytest.CaptureFixture[str]) -> None:
    told = shown(error(fix="choose one of: a-1, b-2", evidence=["a-1", "b-2"]), capfd)
    assert told.count("a-1") == told.count("b-2") == 1
    assert "c-3" in shown(error(fix="choose one of: a-1", evidence=["a-1", "c-3"]), capfd)


def test_the_end_of_a_log_is_shown_whole(capfd: pytest.CaptureFixture[str]) -> None:
    told = shown(error(fix="its log: tail-logs", evidence="log\nkilled\n"), capfd)
    assert [line.strip() for line in told.splitlines()[2:4]] == ["log", "killed"]


def test_several_problems_stand_below_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = shown(error(what="one is wrong\ntwo is wrong"), capfd).splitlines()[:2]
    assert first.index("one") == second.index("two")


def test_a_digest_is_short_where_nobody_types_it(capfd: pytest.CaptureFixture[str]) -> None:
    item: Event = {"event": "prune", "dry_run": True, "fate": "stays", "bytes": 2048, "why": "current"}
    assert "4f465bfaaca0 (2.0 KiB): current" in shown({**item, "kind": "release", "name": DIGEST}, capfd)
    run = "20261129-151233-quickstart-7f3a"
    assert run in shown({**item, "kind": "run", "name": run}, capfd)


def test_a_full_disk_is_told_once_though_the_link_broke(capfd: pytest.CaptureFixture[str]) -> None:
    tell = Teller(Events(HumanView()))
    for _ in range(2):
        tell({"event": "disk_low", "run": "a", "what": "there is room for one"})
        tell({"event": "generation", "run": "a"})
    assert capfd.readouterr().err.count("there is room for one") == 1


def test_amounts() -> None:
    assert (sized(0), sized(2355), sized(17 << 30)) == ("0 B", "2.3 KiB", "17.0 GiB")
    assert (number(1, "patch", "patches"), number(2, "patch", "patches")) == ("1 patch", "2 patches")
    assert (number(1, "file"), number(0, "file")) == ("1 file", "0 files")


@pytest.mark.parametrize("reused", [False, True])
def test_a_warning_of_the_canary_is_shown_also_when_its_verdict_is_reused(
    reused: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    checks = [
        {"id": "gradients", "worker": 0, "outcome": "pass", "summary": "all well"},
        {"id": "throughput", "worker": None, "outcome": "warn", "summary": "a fifth slower than before"},
        {"id": "cuda_graphs", "worker": None, "outcome": "not_checked", "summary": "no CUDA"},
    ]
    verdict: Event = {"event": "verdict", "outcome": "pass", "summary": "proven", "checks": checks}
    told = shown({**verdict, "reused": reused, "why": "made an hour ago"}, capfd)
    assert "warn throughput: a fifth slower than before" in told
    assert "all well" not in told and ("no CUDA" in told) is not reused
    assert told.splitlines()[-1].startswith("canary   pass")


def test_what_to_do_about_a_full_disk_of_the_host() -> None:
    reason = {"kind": "disk_full", "what": "the disk of /w/out was full", "path": "/w/out", "free_bytes": 0}
    told = what_next("a", {"state": "FAILED", "reason": reason})
    assert "/w/out" in told and "`dflash-ops prune --dry-run`" in told and "`dflash-ops resume a`" in told
