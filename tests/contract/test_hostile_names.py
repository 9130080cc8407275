"""Names that a shell would run: over every way to a host they do nothing but name things, or are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import Desk
from tests.contract.conftest import WAYS

PWNED = Path("/tmp/dflash-ops-pwned")
NAME = f"""a b'c"d $(touch {PWNED}) `touch {PWNED}`;touch {PWNED} & | > * ? ~ \\ -rf ü"""


@pytest.fixture(autouse=True)
def _nothing_ran() -> Iterator[None]:
    assert not PWNED.exists()
    yield
    assert not PWNED.exists()


def rewrite(desk: Desk, key: str, value: str) -> None:
    """Puts a value into the host's file, quoted as YAML wants it."""
    quoted = "'" + value.replace("'", "''") + "'"
    path = desk.folder / "hosts" / "box.yaml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{key}:")]
    path.write_text("\n".join([f"{key}: {quoted}", *lines]) + "\n")


def workdir(desk: Desk) -> str:
    lines = (desk.folder / "hosts" / "box.yaml").read_text().splitlines()
    return next(line.removeprefix("workdir: ") for line in lines if line.startswith("workdir: "))


def test_a_work_directory_is_called_what_it_is_called(desk: Desk) -> None:
    place = f"{workdir(desk)}/{NAME}"
    rewrite(desk, "workdir", place)
    done = desk.run("doctor", "--playbook", "tiny")
    assert done.code == 0, done.out + done.err
    assert any(f"free in {place}" in one["what"] for one in done.named("diagnosis"))


def test_a_python_of_that_name_is_not_there(desk: Desk) -> None:
    rewrite(desk, "python", f"/nowhere/{NAME}")
    done = desk.run("runs")
    assert done.code == 5, done.out
    assert done.error["kind"] == "python_missing"


def test_a_run_of_that_name_is_refused(desk: Desk) -> None:
    done = desk.run("status", NAME)
    assert (done.code, done.error["kind"]) == (2, "request"), done.out
    assert done.error["fix"] == "their names: dflash-ops runs"


@pytest.mark.parametrize("desk", WAYS[:2], indirect=True)
def test_a_python_at_a_strange_place_is_used(desk: Desk) -> None:
    place = desk.folder / NAME.replace("/", "_") / "python"
    place.parent.mkdir()
    place.symlink_to(sys.executable)
    rewrite(desk, "python", str(place))
    assert desk.run("runs").code == 0
