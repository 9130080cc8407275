"""A secret of the host's file reaches the trainer, and nothing that a person sees or keeps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.commands import Desk

SECRET = "hf_0123456789abcdef"
TELLING = """--- a/tiny_trainer/__main__.py
+++ b/tiny_trainer/__main__.py
@@ -21,2 +21,3 @@
 from .stacks import print_on_signal
+print(f"the token is {__import__('os').environ['TOKEN']}", flush=True)
 from .stopping import stopped_by_term
@@ -39,2 +40,3 @@
 def _run(settings: Settings, out: Path) -> int:
+    raise RuntimeError(f"refused by https://hub/?token={__import__('os').environ['TOKEN']}")
     stop = threading.Event()
"""


@pytest.fixture
def telling(desk: Desk) -> Desk:
    """A trainer that says its token in every verb, and dies of it as a run."""
    patch = desk.folder / "telling.patch"
    patch.write_text(TELLING)
    path = desk.folder / "playbooks" / "tiny.yaml"
    playbook = json.loads(path.read_text())
    playbook["trainer"]["patches"] = [str(patch)]
    path.write_text(json.dumps(playbook))
    host = f"transport: local\nworkdir: {desk.folder / 'work'}\npython: {sys.executable}\n"
    desk.write_host("box", f"{host}environment: {{NCCL_DEBUG: INFO}}\nsecrets: {{TOKEN: file:token}}\n")
    return desk


def test_a_secret_is_in_nothing_that_is_shown_or_kept(telling: Desk) -> None:
    (telling.folder / "hosts" / "token").write_text(f"{SECRET}\n")
    done = telling.deploy("--debug")
    assert done.code == 8, done.out
    assert "the token is ***" in done.log
    assert "RuntimeError: refused by https://hub/?token=***" in done.log
    (said,) = [one["what"] for one in done.named("diagnosis") if "the trainer gets" in one["what"]]
    assert said == "the trainer gets NCCL_DEBUG=INFO, TOKEN (secret)"
    assert "- variables: NCCL_DEBUG=INFO, TOKEN (secret)" in (Path(done.result["folder"]) / "report.md").read_text()
    assert SECRET not in done.out + done.err
    assert files_with(telling.folder, SECRET) == [telling.folder / "hosts" / "token"]


def files_with(folder: Path, text: str) -> list[Path]:
    files = [Path(parent) / name for parent, _, names in os.walk(folder) for name in names]
    return [path for path in files if path.is_file() and text.encode() in path.read_bytes()]


def test_a_secret_that_cannot_be_read_is_told_before_anything_is_built(telling: Desk) -> None:
    done = telling.deploy()
    assert done.code == 2
    assert done.error["what"].startswith("the secret TOKEN cannot be read from file:")
    assert done.error["what"].endswith("No such file or directory")
    assert not done.named("built")


def test_a_plain_variable_with_a_secrets_value_is_refused(telling: Desk) -> None:
    (telling.folder / "hosts" / "token").write_text(f"{SECRET}\n")
    host = telling.folder / "hosts/box.yaml"
    host.write_text(host.read_text().replace("NCCL_DEBUG: INFO", f"HUB: 'https://hub/?token={SECRET}'"))
    refused = telling.deploy("--debug")
    assert refused.code == 2, refused.out + refused.err
    assert refused.error["what"].startswith("HUB holds the value of the secret TOKEN")
    assert SECRET not in refused.out + refused.err
    assert not refused.named("built")


def test_sources_of_secrets(tmp_path: Path) -> None:
    from dflash_ops.config import Host
    from dflash_ops.deploy.variables import read_variables
    from dflash_ops.errors import OpsError

    def read(source: str) -> str:
        host = Host.model_validate({"name": "box", "transport": "local", "secrets": {"A": source}})
        return read_variables(host, {"TOKEN": SECRET, "SHORT": "abc", "LINES": f"{SECRET}\n{SECRET}"}).secrets["A"]

    (tmp_path / "good").write_text(f"{SECRET}\n")
    (tmp_path / "latin").write_bytes(b"\xff" * 20)
    (tmp_path / "long").write_text("x" * 100_000)
    os.mkfifo(tmp_path / "pipe")
    assert read("env:TOKEN") == read(f"file:{tmp_path}/good") == SECRET
    for source, why in {
        "env:NONE": "not set",
        "env:SHORT": "3 characters",
        "env:LINES": "one line",
        f"file:{tmp_path}/latin": "UTF-8",
        f"file:{tmp_path}/long": "characters",
        f"file:{tmp_path}/pipe": "no regular file",
        f"file:{tmp_path}": "",
        "file:~nobody-of-that-name/x": "No such file",
    }.items():
        with pytest.raises(OpsError) as caught:
            read(source)
        assert caught.value.exit_code == 2
        assert why in caught.value.what
        assert SECRET not in caught.value.what
