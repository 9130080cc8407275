"""Whatever a client asks for: the agent answers, with an error of its own, and touches nothing outside."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_ops.agent.files import digest_of, is_safe_relative
from dflash_ops.agent.server import OPERATIONS
from tests.agent.client import Agent, AgentFailed, manifest_of, member, pack, tar_of

EVIL = "/tmp/dflash-ops-evil"
NAMES = [
    "",
    ".",
    "..",
    "../../../../../../tmp/dflash-ops-evil",
    EVIL,
    f"$(touch {EVIL})",
    f"`touch {EVIL}`",
    f";touch {EVIL}",
    "-rf",
    "--help",
    "a\nb",
    "a\0b",
    "\ud800",
    "x" * 5000,
    "~",
    "~root",
    "'\"",
    "ü",
]
# no release is there that a program could be started from; `lock` waits for its turn
ASKED = sorted(set(OPERATIONS) - {"lock"})
FIELDS = (
    "digest",
    "path",
    "python",
    "module",
    "settings",
    "user",
    "run",
    "key",
    "playbook",
    "reason",
    "policy",
    "cursors",
    "offset",
    "grace_s",
    "timeout_s",
    "max_age_s",
    "environment",
    "secrets",
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from(NAMES) | st.just("0" * 64),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*FIELDS, *NAMES]), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(ASKED), st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6))
def test_any_request_is_answered(shared: Agent, shared_work: Path, op: str, arguments: dict[str, Any]) -> None:
    try:
        reply = shared.call(op, **{**arguments, "wait": False})
    except AgentFailed as failed:
        assert failed.kind != "internal", failed.error
        assert failed.error["exit"] in range(2, 10)
    else:
        json.dumps(reply.result)
    assert not Path(EVIL).exists()


@pytest.mark.parametrize("name", [*NAMES[:12], "a\0b", "\udcff", "x" * 5000, "~", "'\"", "ok.py/x", "ok.py"])
def test_a_release_with_such_a_file_is_refused_or_holds_it(shared: Agent, shared_work: Path, name: str) -> None:
    files = {"ok.py": b"1", "pkg/two.py": b"2"}
    release = pack({**files, name: b"x = 1\n"})
    folder = shared_work / "releases" / release.digest
    try:
        shared.call("stage", digest=release.digest, size=len(release.archive), upload=release.archive)
    except AgentFailed as failed:
        assert (failed.kind, failed.exit) in (("archive", 3), ("host", 5)), failed.error
        assert not folder.exists()
    else:
        assert is_safe_relative(name)
        assert (folder / name).read_bytes() == b"x = 1\n"
    assert list((shared_work / "releases").glob("*.part")) == []
    assert not Path(EVIL).exists()


def test_an_archive_that_unpacks_to_more_than_the_disk_is_refused_before_a_byte_is_written(shared: Agent) -> None:
    digest, manifest = manifest_of({"a.py": b"a"})
    manifest["files"][0]["size"] = 2**60
    digest = digest_of(manifest["files"])
    archive = tar_of([member("manifest.json", json.dumps(manifest).encode()), member("a.py", b"a")])
    with pytest.raises(AgentFailed) as caught:
        shared.call("stage", digest=digest, size=len(archive), upload=archive)
    assert (caught.value.kind, caught.value.exit) == ("disk_full", 5)


def test_an_archive_that_grows_out_of_all_proportion_is_cut_at_what_its_manifest_says(shared: Agent) -> None:
    digest, manifest = manifest_of({"a.py": b"a"})
    archive = tar_of([member("manifest.json", json.dumps(manifest).encode()), member("a.py", bytes(50_000_000))])
    with pytest.raises(AgentFailed) as caught:
        shared.call("stage", digest=digest, size=len(archive), upload=archive)
    assert (caught.value.kind, caught.value.exit) == ("archive", 3)
    assert "size" in caught.value.what


@given(st.text(max_size=40) | st.lists(st.sampled_from(["..", ".", "a", "", "b c"]), max_size=6).map("/".join))
def test_a_plain_relative_path_stays_inside(path: str) -> None:
    if is_safe_relative(path):
        root = Path(tempfile.gettempdir()) / "root"
        assert root in Path(str(root / path)).resolve().parents or (root / path).parent.resolve() == root.resolve()
