"""What a file names is text, and never an option, a path that nobody meant, or a line of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.cli import group
from dflash_ops.config import ConfigError, Host, load_host, load_playbook
from dflash_ops.config.document import Document, parse_document
from dflash_ops.config.translate import validated

CORPUS = [
    "",
    " ",
    "-rf",
    "--help",
    "-oProxyCommand=touch /tmp/dflash-ops-evil",
    "a b",
    "a\nb",
    "a\0b",
    "\x1b[2J",
    "$(touch /tmp/dflash-ops-evil)",
    "`touch /tmp/dflash-ops-evil`",
    "a;b",
    "a|b",
    "../..",
    "/",
    "~",
    "~root/x",
    "'",
    '"',
    "ü",
    "\u202e",
    # half of a character: of a YAML escape, and as Python has a byte of an argument that is no UTF-8
    "/tmp/x\ud800",
    "x\udcff",
    "x" * 5000,
    "user@box",
    "box:22",
    "%h",
    "*",
]
HOSTILE = st.sampled_from(CORPUS) | st.text(max_size=20)


def made(**fields: Any) -> Host | None:
    """None where the file is refused."""
    data = {"name": "box", "transport": "pct", "ssh": {"address": "node"}, "pct": {"id": 100}}
    for key, value in fields.items():
        section, _, name = key.rpartition("__")
        (data[section] if section else data)[name] = value  # type: ignore[index]
    try:
        return validated(Host, data, lambda path: Document("f.yaml", data, {}))
    except ConfigError as error:
        assert error.exit_code == 2
        return None


@given(HOSTILE)
def test_addresses_users_and_names_are_never_options_or_paths(text: str) -> None:
    for host, value in (
        (made(ssh__address=text), lambda host: host.ssh.address),
        (made(ssh__user=text), lambda host: host.ssh.user),
        (made(job_user=text), lambda host: host.job_user),
        (made(name=text), lambda host: host.name),
    ):
        if host is not None:
            assert value(host) == text
            assert re.fullmatch(r"[\w:\[][\w.:%@\[\]$-]*", text), text
            assert ".." not in text.split("/")


@given(HOSTILE)
def test_paths_are_absolute_and_one_line(text: str) -> None:
    for key in ("workdir", "python", "pct__command"):
        for value in (text, f"/{text}"):
            host = made(**{key: value})
            if host is not None:
                assert not re.search(r"[\x00-\x1f\x7f]", value)
                assert value.startswith(("/", "~/")) or re.fullmatch(r"[\w+][\w+.-]*", value, re.ASCII)


@given(HOSTILE, HOSTILE)
def test_a_variable_is_a_name_and_its_value_has_an_end(name: str, value: str) -> None:
    host = made(environment={name: value})
    if host is not None:
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        assert "\0" not in value


@given(st.integers() | HOSTILE | st.floats())
def test_a_container_is_a_number(number: object) -> None:
    host = made(pct__id=number)
    assert host is None or (host.pct is not None and type(host.pct.id) is int and host.pct.id >= 100)


@given(st.text(max_size=60) | st.text("{}[]&*!<>:-\n ab\"'|#%@", max_size=60))
def test_any_text_is_a_document_or_refused(text: str) -> None:
    try:
        parse_document(text, "f.yaml")
    except ConfigError as error:
        assert error.exit_code == 2


@given(st.text(st.characters(min_codepoint=0xD7FF, max_codepoint=0xE000, exclude_categories=())))
def test_text_of_a_document_is_whole_characters(text: str) -> None:
    """`json.dumps` writes them as the escapes of YAML."""
    for data in (text, {"key": text}, {f"key{text}": 1}, [{"a": {"b": text}}]):
        try:
            document = parse_document(f"# a line\n{json.dumps(data)}", "f.yaml")
        except ConfigError as error:
            assert error.exit_code == 2
            assert {problem.line for problem in error.problems} == {2}
            assert all("is half of a character" in problem.message for problem in error.problems)
        else:
            json.dumps(document.data, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "line", ['workdir: "/tmp/x\\ud800"', 'python: "/x\\ud800"', 'environment: {A: "x\\ud800"}', '"\\ud800": 1']
)
def test_half_of_a_character_is_told_with_its_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "box.yaml").write_text(f"transport: local\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_host("box", tmp_path, env={}, last_host=None)
    problem, *_ = caught.value.problems
    assert (problem.file, problem.line) == (str(tmp_path / "box.yaml"), 2)
    assert problem.message == r"\ud800 is half of a character"


@pytest.mark.parametrize("name", CORPUS)
def test_hosts_playbooks_and_inventories_of_such_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # a folder is an inventory, an empty one here: its only host is the bundled one
    for load in (
        lambda: load_host(name, None, env={}, last_host=None),
        lambda: load_playbook(name, env={}),
        lambda: load_host("x", Path(name), env={}, last_host=None),
    ):
        with pytest.raises(ConfigError) as caught:
            load()
        assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []
    text = json.dumps({"source": name, "patches": [name]})
    Path("p.yaml").write_text(
        f"version: 1\ntrainer: {text}\nworkload: {{target: t, mask_token: 1}}\ntraining: {{steps: 1}}\n"
    )
    with pytest.raises(ConfigError):
        load_playbook("p.yaml", env={})
    assert not Path("/tmp/dflash-ops-evil").exists()


@given(HOSTILE)
def test_a_run_is_named_after_a_playbook_or_the_playbook_is_refused(text: str) -> None:
    document = {"version": 1, "name": text, "workload": {"target": "t", "mask_token": 1}, "training": {"steps": 1}}
    from dflash_ops.agent.arguments import RUN_NAME
    from dflash_ops.config import Playbook
    from dflash_ops.deploy.records import new_run_id

    try:
        playbook = validated(Playbook, document, lambda path: Document("f.yaml", document, {}))
    except ConfigError:
        return
    assert RUN_NAME.fullmatch(new_run_id(f"{playbook.name}-canary"))


def test_commands_take_no_option_from_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for words in (["status", "--host", "--json"], ["check", "--playbook", "-x"], ["build", "--set", "--json"]):
        assert group.main(args=words, prog_name="dflash-ops", standalone_mode=False) == 2
