"""What OpenSSH's own files say is honoured: aliases, jumps (each key checked), agents, known hosts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from dflash_ops.config import load_host
from dflash_ops.transport.ssh import SshTransport
from tests.commands import Desk, local_desk
from tests.rig.delay import delayed
from tests.rig.rig import Rig

pytestmark = pytest.mark.rig


@pytest.fixture
def desk(tmp_path: Path, rig: Rig) -> Desk:
    """Its host is an alias of ~/.ssh/config, and nothing more."""
    desk = local_desk(tmp_path)
    desk.environment["SSH_AUTH_SOCK"] = ""
    write(desk, f"Host target\n  HostName 127.0.0.1\n  Port {rig.port}\n  User root\n  IdentityFile {rig.identity}\n")
    (home(desk) / "known_hosts").write_bytes(rig.known_hosts.read_bytes())
    desk.write_host("box", f"transport: ssh\nworkdir: {tmp_path / 'work'}\nssh:\n  address: target\n")
    return desk


@pytest.fixture
def jump_port(rig: Rig) -> Iterator[int]:
    """The rig's sshd by another name, so that known_hosts tells the two apart."""
    with delayed(rig.port, 0) as link:
        yield link.port


def home(desk: Desk) -> Path:
    folder = Path(desk.env()["HOME"]) / ".ssh"
    folder.mkdir(exist_ok=True)
    return folder


def write(desk: Desk, config: str) -> None:
    with (home(desk) / "config").open("a") as file:
        file.write(config)


def trust(desk: Desk, rig: Rig, *ports: int) -> None:
    key = rig.known_hosts.read_text().split(" ", 1)[1]
    (home(desk) / "known_hosts").write_text("".join(f"[127.0.0.1]:{port} {key}" for port in ports))


def through(desk: Desk, jumps: str, rig: Rig, **ports: int) -> None:
    """`target` goes through `jumps`; each named port is an alias of 127.0.0.1."""
    for name, port in ports.items():
        write(desk, f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n  User root\n  IdentityFile {rig.identity}\n")
    write(desk, f"Host target\n  ProxyJump {jumps}\n")


def test_an_alias(desk: Desk) -> None:
    done = desk.run("runs")
    assert done.code == 0, done.out


def test_an_agent_holds_the_key(desk: Desk, rig: Rig, tmp_path: Path) -> None:
    config = home(desk) / "config"
    config.write_text(config.read_text().replace(f"  IdentityFile {rig.identity}\n", ""))
    keyless = desk.run("runs").error
    assert keyless["what"].startswith("there is no key for target (127.0.0.1:")
    assert keyless["fix"] == "`ssh target true` must work without a password"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(tmp_path / "agent")], stdout=subprocess.PIPE)
    try:
        assert agent.stdout is not None
        agent.stdout.readline()
        desk.environment["SSH_AUTH_SOCK"] = str(tmp_path / "agent")
        subprocess.run(["ssh-add", "-q", str(rig.identity)], env={**os.environ, **desk.environment}, check=True)
        done = desk.run("runs")
    finally:
        agent.kill()
        agent.communicate()
    assert done.code == 0, done.out


def test_a_jump_whose_key_is_not_known(desk: Desk, rig: Rig, jump_port: int) -> None:
    through(desk, "first", rig, first=jump_port)
    trust(desk, rig, rig.port)
    refused = desk.run("runs")
    assert refused.code == 4
    assert f"the host key of the jump host [127.0.0.1]:{jump_port} is not known" in refused.error["what"]
    assert "`ssh first true`" in refused.error["fix"] and "fingerprint:" not in refused.error["fix"]
    trust(desk, rig, rig.port, jump_port)
    done = desk.run("runs")
    assert done.code == 0, done.out
    # a pin speaks for the host alone, and the host is checked behind a jump too
    trust(desk, rig, jump_port)
    hidden = desk.run("runs")
    assert f"the host key of [127.0.0.1]:{rig.port} is not known" in hidden.error["what"]
    host = (desk.folder / "hosts/box.yaml").read_text()
    desk.write_host("box", f"{host}  fingerprint: {rig.host_key_fingerprint}\n")
    assert desk.run("runs").code == 0
    trust(desk, rig, rig.port)
    assert "the jump host" in desk.run("runs").error["what"]


def test_a_jump_whose_key_has_changed(desk: Desk, rig: Rig, jump_port: int) -> None:
    through(desk, "first", rig, first=jump_port)
    other = rig.identity.with_suffix(".pub").read_text().split()[1]
    with (home(desk) / "known_hosts").open("a") as file:
        file.write(f"[127.0.0.1]:{jump_port} ssh-ed25519 {other}\n")
    refused = desk.run("runs")
    assert f"the jump host [127.0.0.1]:{jump_port} has CHANGED" in refused.error["what"]
    assert f"ssh-keygen -R '[127.0.0.1]:{jump_port}'" in refused.error["fix"]


def test_jumps_are_taken_in_their_order(desk: Desk, rig: Rig, jump_port: int) -> None:
    with delayed(rig.port, 0) as second:
        through(desk, "first,second", rig, first=jump_port, second=second.port)
        trust(desk, rig, rig.port, jump_port, second.port)
        done = desk.run("runs")
        assert done.code == 0, done.out
        # where no key is known, the first that is met is told
        trust(desk, rig, rig.port)
        assert f"[127.0.0.1]:{jump_port}" in desk.run("runs").error["what"]
        trust(desk, rig, rig.port, jump_port)
        assert f"[127.0.0.1]:{second.port}" in desk.run("runs").error["what"]


def test_a_dead_jump_is_named(desk: Desk, rig: Rig) -> None:
    through(desk, "root@first", rig, first=1)
    failed = desk.run("runs")
    assert failed.code == 4
    assert failed.error["what"].startswith("cannot reach the jump host first (127.0.0.1:1): ")
    assert failed.error["fix"] == "see why: `ssh root@first true`"


def test_a_dead_host_behind_a_jump_is_named(desk: Desk, rig: Rig, jump_port: int) -> None:
    through(desk, "first", rig, first=jump_port)
    trust(desk, rig, jump_port)
    host = (desk.folder / "hosts/box.yaml").read_text()
    desk.write_host("box", f"{host}  port: 1\n")
    failed = desk.run("runs")
    assert failed.error["what"].startswith("cannot reach target (127.0.0.1:1) through first: ")
    assert failed.error["fix"] == "see why: `ssh -p 1 target true`"


def test_a_login_that_the_jump_refuses_is_not_the_hosts(desk: Desk, rig: Rig, jump_port: int) -> None:
    write(desk, f"Host first\n  HostName 127.0.0.1\n  Port {jump_port}\n  User nobody-here\n")
    through(desk, "first", rig, first=jump_port)
    trust(desk, rig, rig.port, jump_port)
    failed = desk.run("runs")
    assert failed.error["what"] == f"the jump host first (127.0.0.1:{jump_port}) refused the login of nobody-here"
    assert failed.error["fix"] == "`ssh first true` must work without a password"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("Host target\n  ProxyJump first\nHost first\n  ProxyJump target\n", "leads back to target"),
        ("nonsense\n", "Unparsable line nonsense"),
        ("Host target\n  ProxyJump first:door\n", "door"),
    ],
)
def test_a_configuration_that_is_no_way(desk: Desk, config: str, why: str) -> None:
    write(desk, config)
    failed = desk.run("runs")
    assert failed.code == 4
    assert failed.error["what"].startswith("~/.ssh/config cannot be used: ") and why in failed.error["what"]
    assert failed.error["fix"] == "see what ssh makes of it: `ssh -G target`"


def test_a_jump_that_a_pattern_gives_to_itself_too(desk: Desk, rig: Rig, jump_port: int) -> None:
    through(desk, "first", rig, first=jump_port)
    write(desk, "Host *\n  ProxyJump first\n")
    trust(desk, rig, rig.port, jump_port)
    done = desk.run("runs")
    assert done.code == 0, done.out


def test_small_packets_go_at_once_and_every_hop_takes_aes_gcm(
    desk: Desk, rig: Rig, jump_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks at the sockets themselves: nothing else tells the delay of a link from Nagle's."""
    through(desk, "first", rig, first=jump_port)
    trust(desk, rig, rig.port, jump_port)
    for name, value in desk.env().items():
        monkeypatch.setenv(name, value)
    for address in ("target", "first"):
        desk.write_host("box", f"transport: ssh\nssh:\n  address: {address}\n")
        host, _ = load_host("box", desk.folder / "hosts", env={}, last_host=None)
        assert host.ssh is not None
        transport = SshTransport(host.ssh, lambda text: None)
        channel = transport.open(["true"])
        try:
            hops = links(channel._channel.get_transport())
            assert len(hops) == (2 if address == "target" else 1)
            assert all("gcm" in hop.local_cipher for hop in hops)
            assert hops[-1].sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        finally:
            channel.close()
            transport.close()
        assert not any(hop.is_active() for hop in hops)


def links(transport: Any) -> list[paramiko.Transport]:
    """The transport, and those that carry it."""
    found = [transport]
    while isinstance(found[-1].sock, paramiko.Channel):
        found.append(found[-1].sock.get_transport())
    return found


def test_known_hosts_are_where_ssh_config_says(desk: Desk, rig: Rig) -> None:
    default = home(desk) / "known_hosts"
    kept = default.rename(home(desk) / "my hosts")
    assert "is not known" in desk.run("runs").error["what"]
    for words in (
        f'UserKnownHostsFile "{kept}"',
        f'UserKnownHostsFile /nowhere/at-all "{kept}"',
        f'UserKnownHostsFile "{kept}" "/nowhere/at all"',
        "UserKnownHostsFile ~/nowhere ~/.ssh/plain",
        "UserKnownHostsFile none\n  GlobalKnownHostsFile ~/.ssh/plain",
    ):
        shutil.copyfile(kept, home(desk) / "plain")
        before = (home(desk) / "config").read_text()
        write(desk, f"Host target\n  {words}\n")
        done = desk.run("runs")
        assert done.code == 0, (words, done.out)
        (home(desk) / "config").write_text(before)


def test_a_file_of_known_hosts_that_is_none_is_named(desk: Desk) -> None:
    known = home(desk) / "known_hosts"
    known.write_bytes(b"\xff\xfe\n")
    failed = desk.run("runs")
    assert failed.code == 4
    assert failed.error["what"] == f"{known} cannot be read: it is not text"
