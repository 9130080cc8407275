"""The folders that come with dflash-ops, in a checkout; and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_ops.config import ConfigError, bundled, places

ROOT = Path(__file__).parents[2]


def test_a_checkouts_own_folders() -> None:
    for name in ("trainer", "playbooks", "hosts"):
        assert bundled(name).samefile(ROOT / name)


def test_a_stranger_beside_the_package_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages/dflash_ops/config"
    package.mkdir(parents=True)
    (tmp_path / "site-packages/trainer").mkdir()
    monkeypatch.setattr(places, "__file__", str(package / "places.py"))
    with pytest.raises(ConfigError, match="the bundled folder 'trainer' is missing; install dflash-ops again"):
        bundled("trainer")


def test_the_error_type_costs_no_pydantic_and_nothing_costs_torch() -> None:
    code = (
        "import sys; from dflash_ops.config import ConfigError; assert 'pydantic' not in sys.modules; "
        "from dflash_ops.config import load_host, load_playbook; load_playbook('quickstart', sets=[]); "
        "assert not {'torch', 'fabric', 'paramiko'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_public_name_is_there() -> None:
    from dflash_ops import config

    assert all(hasattr(config, name) for name in config.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Hosts'"):
        _ = config.Hosts
