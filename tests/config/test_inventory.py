"""Which host is used, why, and what is told where none can be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dflash_ops.config import ConfigError, Host, load_host

SSH = "transport: ssh\nssh: {address: box}\n"
PCT = "transport: pct\nssh: {address: node}\npct: {id: 200}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def load(
    name: str | None = None,
    inventory: str | None = None,
    last: str | None = None,
    run_host: str | None = None,
    **env: str,
) -> tuple[Host, str]:
    env = {"XDG_CONFIG_HOME": str(Path("xdg").absolute()), **env}
    return load_host(name, Path(inventory) if inventory else None, env=env, last_host=last, run_host=run_host)


def refused(name: str | None = None, inventory: str | None = None, **env: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(name, inventory, **env)
    return str(caught.value).splitlines()


def test_the_order_of_choice() -> None:
    for name in ("a", "b", "c"):
        write(SSH, f"hosts/{name}.yaml")
    chosen = [
        load("a", run_host="b", last="c", DFLASH_OPS_HOST="b"),
        load(run_host="a", last="c", DFLASH_OPS_HOST="b"),
        load(run_host="gone", last="c", DFLASH_OPS_HOST="b"),
        load(last="c", DFLASH_OPS_HOST="b"),
        load(last="c"),
    ]
    assert [(host.name, why) for host, why in chosen] == [
        ("a", "--host"),
        ("a", "host of that run"),
        ("b", "$DFLASH_OPS_HOST"),
        ("b", "$DFLASH_OPS_HOST"),
        ("c", "host of the last run"),
    ]
    assert refused() == ["./hosts: there are several hosts; choose one with --host: a, b, c"]


def test_the_only_host_and_a_last_host_that_is_gone() -> None:
    write(SSH, "hosts/box.yaml")
    write(PCT, "hosts/ct200.example.yaml")
    host, why = load(last="gone")
    assert (host.name, why) == ("box", "the only host in ./hosts")


def test_without_an_inventory_there_is_this_machine() -> None:
    host, why = load()
    assert (host.transport, why) == ("local", "the only host: no inventory was found")
    assert load("local")[0].python == sys.executable


def test_here_comes_before_the_users_configuration_and_an_inventory_before_both(folder: Path) -> None:
    write(SSH, "xdg/dflash-ops/hosts/box.yaml")
    assert load("box")[0].transport == "ssh"
    write(PCT, "hosts/box.yaml")
    assert load("box")[0].transport == "pct"
    write("hosts:\n  other: {transport: local}\n  local: {transport: local, workdir: /scratch}\n", "mine.yaml")
    assert load("other", "mine.yaml")[0].transport == "local"
    assert load("local", "mine.yaml")[0].workdir == "/scratch"
    assert refused("box", "mine.yaml") == ["mine.yaml: there is no host 'box' (--host); known: local, other"]
    assert refused("x", "none.yaml") == ["none.yaml: there is no such inventory file or folder"]


def test_an_example_is_no_host_until_it_is_copied_or_named() -> None:
    write(PCT, "hosts/ct200.example.yaml")
    assert refused("ct200") == [
        "./hosts: there is no host 'ct200' (--host), only an example; "
        "copy hosts/ct200.example.yaml to hosts/ct200.yaml and fill it in"
    ]
    assert load(None, "hosts/ct200.example.yaml")[0].name == "ct200"


def test_an_unknown_host_names_the_nearest_and_where_the_name_came_from() -> None:
    write(SSH, "hosts/gpubox.yaml")
    assert refused("gpubx") == [
        "./hosts: there is no host 'gpubx' (--host); did you mean 'gpubox'? (known: gpubox, local)"
    ]
    assert "($DFLASH_OPS_HOST)" in refused(DFLASH_OPS_HOST="gpubx")[0]


def test_a_broken_file_hides_only_its_own_hosts() -> None:
    write(SSH, "hosts/good.yaml")
    write("transport: [\n", "hosts/bad.yaml")
    assert load("good")[0].name == "good"
    assert refused("bad")[0].startswith("hosts/bad.yaml:2: not valid YAML")
    assert refused()[0].startswith("hosts/bad.yaml:2: not valid YAML")


def test_a_name_in_two_files_of_a_folder_is_refused() -> None:
    write(SSH, "hosts/a.yaml")
    write("name: a\n" + PCT, "hosts/b.yaml")
    assert refused() == ["hosts/b.yaml:1: the host 'a' stands in two files; also in hosts/a.yaml"]


def test_several_hosts_in_a_file_have_their_own_lines() -> None:
    write("hosts:\n  a:\n    transport: ssh\n    ssh: {address: x}\n  b:\n    transport: ssh\n    shs: {}\n", "i.yaml")
    assert load("a", "i.yaml")[0].ssh is not None
    assert refused("b", "i.yaml") == [
        "i.yaml:6: transport ssh needs the section 'ssh'",
        "i.yaml:7: unknown key 'shs'; did you mean 'ssh'?",
    ]
    write("hosts: {}\n", "empty.yaml")
    assert refused("b", "empty.yaml")[0].startswith("empty.yaml:1: 'hosts' must be a mapping")
    write("hosts: {a: {transport: local}}\nport: 1\n", "mixed.yaml")
    assert refused("a", "mixed.yaml")[0].startswith("mixed.yaml:2: unknown key 'port' beside 'hosts'")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("transport: local\nssh: {address: x}\n", "2: transport local cannot have the section 'ssh'"),
        ("transport: ssh\n", "1: transport ssh needs the section 'ssh'"),
        ("transport: pct\nssh: {address: x}\n", "1: transport pct needs the section 'pct'"),
        ("transport: pc\n", "1: transport must be 'local', 'ssh' or 'pct', not \"pc\"; did you mean 'pct'?"),
        ("workdir: /w\n", "1: 'transport' is required"),
        (
            "transport: local\nworkdir: runs\n",
            '2: workdir must be an absolute path, or one that begins with ~/, not "runs"',
        ),
        (
            "transport: local\npython: venv/bin/python\n",
            '2: python must be an absolute path, or a name found on PATH, not "venv/bin/python"',
        ),
        (
            "transport: ssh\nssh: {address: -oProxyCommand=x}\n",
            "2: ssh.address must be a host name, an address or an alias of ssh_config, nothing else, not "
            '"-oProxyCommand=x"',
        ),
        (
            "transport: ssh\nssh: {address: me@box}\n",
            '2: ssh.address must be a host name, an address or an alias of ssh_config, nothing else, not "me@box"',
        ),
        ("transport: ssh\nssh: {address: x, port: 0}\n", "2: ssh.port must be from 1 to 65535, not 0"),
        (
            "transport: ssh\nssh: {address: x, fingerprint: SHA256:abc}\n",
            "2: ssh.fingerprint must be like 'SHA256:' and 43 characters of base64, not \"SHA256:abc\"",
        ),
        (
            "transport: ssh\nssh: {address: x, host_key: accept}\n",
            "2: ssh.host_key must be 'strict' or 'accept-new', not \"accept\"; did you mean 'accept-new'?",
        ),
        ("transport: pct\nssh: {address: x}\npct: {id: '200'}\n", '3: pct.id must be a whole number, not "200"'),
        (
            "transport: pct\nssh: {address: x}\npct: {id: 200, address: y}\n",
            "3: unknown key 'address' in pct; it belongs in ssh",
        ),
    ],
)
def test_what_is_wrong_in_a_host_is_told_at_its_line(text: str, told: str) -> None:
    write(text, "hosts/h.yaml")
    assert refused("h") == [f"hosts/h.yaml:{told}"]


def test_defaults_and_paths_of_a_container(folder: Path) -> None:
    write(PCT.replace("node}", "node, identity_file: keys/id, known_hosts: ~/kh}"), "hosts/ct.yaml")
    host = load("ct")[0]
    assert (host.python, host.workdir, host.job_user) == ("python3", "/var/lib/dflash-ops", None)
    assert host.ssh is not None
    assert host.pct is not None
    assert (host.ssh.identity_file, host.ssh.known_hosts) == (str(folder / "hosts/keys/id"), "~/kh")
    assert (host.ssh.port, host.ssh.host_key, host.ssh.fingerprint) == (None, "strict", None)
    assert (host.pct.transfer, host.pct.become, host.pct.command) == ("stream", "none", "/usr/sbin/pct")


def test_variables_and_secrets() -> None:
    text = "transport: local\nenvironment: {NCCL_DEBUG: INFO}\nsecrets: {A: env:TOKEN, B: file:keys/b, C: file:~/c}\n"
    write(text, "hosts/box.yaml")
    host, _ = load("box")
    assert host.environment == {"NCCL_DEBUG": "INFO"}
    assert host.secrets == {"A": "env:TOKEN", "B": f"file:{Path('hosts/keys/b').absolute()}", "C": "file:~/c"}


def test_who_is_told() -> None:
    write("transport: local\nnotify: {webhook: file:keys/hook}\n", "hosts/box.yaml")
    host, _ = load("box")
    assert host.notify is not None
    assert host.notify.webhook == f"file:{Path('hosts/keys/hook').absolute()}"
    write("transport: local\nnotify: {command: [/usr/bin/page, '']}\n", "hosts/box.yaml")
    host, _ = load("box")
    assert host.notify is not None
    assert host.notify.command == ("/usr/bin/page", "")
    for wrong in ("{}", "{command: [/bin/a], webhook: env:HOOK}", "{command: []}"):
        write(f"transport: local\nnotify: {wrong}\n", "hosts/box.yaml")
        assert refused("box")[0].startswith("hosts/box.yaml:2: notify")
    write("transport: local\nnotify: {webhook: 'https://hooks.example.com/s3cr3t'}\n", "hosts/box.yaml")
    (problem,) = refused("box")
    assert "env:VARIABLE or file:PATH" in problem
    assert "s3cr3t" not in problem


def test_what_is_no_variable_or_no_source_is_refused_and_no_secret_is_repeated() -> None:
    text = "transport: local\nenvironment: {A: x, PATH: /bin}\nsecrets:\n  TOKEN: hf_abcdefgh\n  B: env:-x\n"
    write(text, "hosts/box.yaml")
    problems = refused("box")
    assert problems[0].startswith("hosts/box.yaml:2: a key of environment must be a variable's name, and none that")
    assert problems[0].endswith('not "PATH"')
    assert problems[1].startswith("hosts/box.yaml:4: secrets.TOKEN must be env:VARIABLE or file:PATH")
    assert "hf_abcdefgh" not in "".join(problems)
    write("transport: local\nenvironment: {A: x}\nsecrets: {A: env:B}\n", "hosts/box.yaml")
    assert refused("box") == ["hosts/box.yaml:3: secrets has A, which stands in environment too"]
