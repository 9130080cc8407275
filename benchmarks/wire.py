"""The wire against plain fabric, ansible-core, scp and ssh: `python benchmarks/wire.py NAME [--quick]` (as root).

Everything runs against the rig of the tests (real sshd, real container, `pct` with the start-up time of the real one),
directly and behind a proxy that delays by 20 and 80 ms a round trip. Writes results/NAME/wire.md and wire.json.
ansible-core comes from a virtual environment in the temporary folder, made where it is not there yet.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PCT_STARTUP_MS = 850
os.environ["PCT_STARTUP_MS"] = str(PCT_STARTUP_MS)
os.environ["PYTHONPATH"] = str(ROOT)
# what is installed has its bytecode
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONPYCACHEPREFIX"] = tempfile.mkdtemp(prefix="bench-wire-pycache-")
atexit.register(shutil.rmtree, os.environ["PYTHONPYCACHEPREFIX"], ignore_errors=True)

from dflash_ops.config import load_host, load_playbook  # noqa: E402
from dflash_ops.deploy.events import Events  # noqa: E402
from dflash_ops.deploy.follow import follow  # noqa: E402
from dflash_ops.deploy.session import Session  # noqa: E402
from dflash_ops.errors import OpsError  # noqa: E402
from dflash_ops.transport import Conversation  # noqa: E402
from dflash_ops.transport.local import LocalChannel, LocalTransport  # noqa: E402
from tests.commands import Desk  # noqa: E402
from tests.rig.delay import delayed  # noqa: E402
from tests.rig.rig import Rig  # noqa: E402

ANSIBLE = Path(tempfile.gettempdir()) / "dflash-ops-bench-ansible"
PYTHON = sys.executable
MIB, GIB = 1 << 20, 1 << 30
PUT_WAYS, GET_WAYS = ("scp and pct push", "ssh and pct exec cat"), ("pct pull and scp", "ssh and pct exec cat")
CONTAINER_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Place:
    """The rig, as it is reached at one delay."""

    rig: Rig
    rtt_ms: int
    port: int
    folder: Path
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def ssh_options(self) -> list[str]:
        return [
            *("-F", str(self.rig.ssh_config), "-o", f"Port={self.port}"),
            *("-o", f"UserKnownHostsFile={self.folder / 'known_hosts'}"),
        ]

    def ssh(self, *argv: str) -> list[str]:
        return ["ssh", *self.ssh_options, "node", shlex.join(argv)]

    def host_text(self, kind: str, workdir: str) -> str:
        pct = f"pct:\n  id: {self.rig.container_id}\n"
        if kind == "pct exec":
            kind, pct = "pct", f"{pct}  command: {self.rig.folder / 'sbin' / 'pct'}\n"
        return (
            f"transport: {kind}\npython: {PYTHON}\nworkdir: {workdir}\nssh:\n  address: 127.0.0.1\n  user: root\n"
            f"  port: {self.port}\n  identity_file: {self.rig.identity}\n  known_hosts: {self.folder / 'known_hosts'}\n"
        ) + (pct if kind == "pct" else "")

    def keep(self, name: str, value: float) -> None:
        self.figures[name] = round(value, 4)
        print(f"  {self.rtt_ms:3d} ms  {name:44} {value:10.3f}", flush=True)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def quiet(argv: Sequence[str], **more: Any) -> None:
    where = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **more}
    done = subprocess.run(argv, check=False, **where)
    if done.returncode:
        said = b"".join(filter(None, (done.stdout, done.stderr))).decode(errors="replace")
        raise SystemExit(f"{shlex.join(argv)}\n{said[-3000:]}")


# ---- deploys into the container


def our_deploys(place: Place, desk: Desk, times: int) -> None:
    """Cold without a canary (what the others do), the canary once, then of what is there and proven: without a look at
    the run's first steps, as the others do, with it, as a person has it, and through `pct exec`."""
    work = f"/var/lib/bench-{uuid.uuid4().hex[:8]}"
    desk.write_host("box", place.host_text("pct", work))

    def deployed(*words: str) -> None:
        # a process of its own, its imports too, as a person and ansible have it
        quiet(desk.argv("deploy", "--playbook", "tiny", "--host", "box", "--detach", *words), **typed)

    typed: dict[str, Any] = {"cwd": desk.folder, "env": desk.env(), "stdout": subprocess.PIPE}

    def settled() -> None:
        while desk.run("status").result["state"] == "RUNNING":
            time.sleep(0.2)

    place.keep("cold deploy, dflash-ops, s", seconds(lambda: deployed("--skip-canary", "--reason", "benchmark")))
    settled()
    deployed()
    settled()
    for words, name, kind in (
        ((), "", "pct"),
        (("--set", "run.probation_steps=3"), " and its first steps seen", "pct"),
        ((), " through pct exec", "pct exec"),
    ):
        desk.write_host("box", place.host_text(kind, work))
        warm = []
        for _ in range(times):
            warm.append(seconds(lambda words=words: deployed(*words)))
            settled()
        place.keep(f"no-change deploy{name}, dflash-ops, s", statistics.median(warm))
    desk.write_host("box", place.host_text("pct", work))


@dataclass
class Steps:
    """The same steps, typed one by one: as `pct` calls on the node."""

    place: Place
    archive: Path
    sha256: str
    settings: Path
    work: str = field(default_factory=lambda: f"/var/lib/plain-{uuid.uuid4().hex[:8]}")

    @property
    def release(self) -> str:
        return f"{self.work}/releases/{self.sha256[:16]}"

    def inside(self, *argv: str) -> str:
        clean = ["/usr/bin/env", "-i", f"PATH={CONTAINER_PATH}", "HOME=/root", *argv]
        return shlex.join(["pct", "exec", str(self.place.rig.container_id), "--", *clean])

    def push(self, source: str, target: str) -> str:
        return shlex.join(["pct", "push", str(self.place.rig.container_id), source, target])

    @property
    def look(self) -> str:
        return self.inside("test", "-d", self.release)

    @property
    def bring(self) -> list[str]:
        """After the archive and the settings lie in the node's /tmp."""
        unpack = f"cd {self.release}.part && sha256sum a.tgz | grep -q {self.sha256} && tar xzf a.tgz && rm a.tgz"
        return [
            self.inside("mkdir", "-p", f"{self.release}.part"),
            self.push("/tmp/bench-a.tgz", f"{self.release}.part/a.tgz"),
            self.push("/tmp/bench-settings.json", f"{self.work}/settings.json"),
            self.inside("sh", "-c", unpack),
            self.inside("mv", "-T", f"{self.release}.part", self.release),
        ]

    @property
    def go(self) -> list[str]:
        verb = [PYTHON, "-m", "tiny_trainer", "check", "--settings", f"{self.work}/settings.json", "--out"]
        run = f"mkdir -p {self.work}/out && cd {self.release} && exec {shlex.join(verb)} {self.work}/out"
        return [
            self.inside(PYTHON, "-m", "compileall", "-q", self.release),
            self.inside("ln", "-sfn", self.release, f"{self.work}/current"),
            self.inside("sh", "-c", run),
            self.inside("systemd-run", "-q", f"--unit=plain-{uuid.uuid4().hex[:8]}", "sleep", "1"),
        ]


BY_FABRIC = """
import json, sys
from fabric import Connection
said = json.load(sys.stdin)
keys = {"key_filename": said["key"]}
with Connection("127.0.0.1", user="root", port=said["port"], connect_kwargs=keys) as node:
    if node.run(said["look"], hide=True, warn=True, in_stream=False).failed:
        for name, source in said["put"].items():
            node.put(source, name)
        for command in said["bring"]:
            node.run(command, hide=True, in_stream=False)
    for command in said["go"]:
        node.run(command, hide=True, in_stream=False)
"""


def by_fabric(steps: Steps) -> None:
    """In a process of its own, as the two others are."""
    place = steps.place
    said = {
        "key": str(place.rig.identity),
        "port": place.port,
        "look": steps.look,
        "put": {"/tmp/bench-a.tgz": str(steps.archive), "/tmp/bench-settings.json": str(steps.settings)},
        "bring": steps.bring,
        "go": steps.go,
    }
    quiet([PYTHON, "-c", BY_FABRIC], input=json.dumps(said).encode())


def by_ansible(steps: Steps) -> None:
    place = steps.place
    folder = Path(tempfile.mkdtemp(dir=place.folder))
    absent: dict[str, object] = {"when": "there.rc != 0"}
    tasks: list[dict[str, object]] = [
        {"command": steps.look, "register": "there", "failed_when": False, "changed_when": False},
        {"copy": {"src": str(steps.archive), "dest": "/tmp/bench-a.tgz"}, **absent},
        {"copy": {"src": str(steps.settings), "dest": "/tmp/bench-settings.json"}, **absent},
        *({"command": command, **absent} for command in steps.bring),
        *({"command": command} for command in steps.go),
    ]
    (folder / "play.yaml").write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    options = shlex.join(place.ssh_options)
    (folder / "hosts").write_text(
        f"node ansible_ssh_common_args={shlex.quote(options)} ansible_python_interpreter={PYTHON}\n"
    )
    argv = [str(ANSIBLE / "bin" / "ansible-playbook"), "-i", str(folder / "hosts"), str(folder / "play.yaml")]
    # without pipelining it asks for a terminal, whose end kills what runs in the container (rc 129), and is slower
    settings = {"ANSIBLE_HOME": str(folder), "ANSIBLE_PIPELINING": "1"}
    quiet(argv, env={**os.environ, **settings}, cwd=folder, stdout=subprocess.PIPE)


def other_deploys(place: Place, steps: Steps, name: str, deploy: Callable[[Steps], None], times: int) -> None:
    place.keep(f"cold deploy, {name}, s", seconds(lambda: deploy(steps)))
    warm = [seconds(lambda: deploy(steps)) for _ in range(times)]
    place.keep(f"no-change deploy, {name}, s", statistics.median(warm))


# ---- bytes, to the node as a plain host


class SystemSsh(LocalTransport):
    """Our frames over the system's ssh: what a bulk channel of its own would bring."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def open(self, argv: Sequence[str]) -> LocalChannel:
        return super().open(self._place.ssh(*argv))


def raw_bytes(place: Place, size: int, times: int) -> None:
    blob = place.folder / "blob"
    blob.write_bytes(os.urandom(size))
    there = str(place.folder / "there")
    copy = ["scp", *place.ssh_options]
    with blob.open("rb") as data:

        def ssh_put() -> None:
            data.seek(0)
            quiet(place.ssh("sh", "-c", f"cat > {shlex.quote(there)}"), stdin=data)

        def ssh_get() -> None:
            with (place.folder / "back").open("wb") as file:
                quiet(place.ssh("cat", there), stdout=file)

        ways: dict[str, Callable[[], None]] = {
            "up, scp": lambda: quiet([*copy, str(blob), f"node:{there}"]),
            "up, ssh cat": ssh_put,
            "down, scp": lambda: quiet([*copy, f"node:{there}", str(place.folder / "back")]),
            "down, ssh cat": ssh_get,
        }
        for name, way in ways.items():
            spent = min(seconds(way) for _ in range(times))
            place.keep(f"{sized(size)} {name}, MiB/s", size / MIB / spent)
    blob.unlink()


def sized(size: int) -> str:
    return f"{size // MIB} MiB" if size < GIB else f"{size // GIB} GiB"


def our_bytes(place: Place, ways: Mapping[str, Conversation], run: str, size: int, times: int) -> None:
    """Up, and down again to a file that is verified. `out/blob.bin` of the run is there."""
    archive = os.urandom(size)

    def down(conversation: Conversation) -> None:
        found = hashlib.sha256()
        with (place.folder / "came").open("wb") as file:

            def on_data(_: int, data: bytes) -> None:
                file.write(data)
                found.update(data)

            asked = {"run": run, "path": "out/blob.bin", "offset": 0, "length": None, "digest": True}
            told = conversation.request("read", asked, on_data=on_data)
        assert told["sha256"] == found.hexdigest()

    def up(conversation: Conversation) -> None:
        # written and hashed there, then refused: what is measured is the way, not the unpacking
        with contextlib.suppress(OpsError):
            wrong = {"digest": uuid.uuid4().hex * 2, "size": size, "sha256": "0" * 64}
            conversation.request("stage", wrong, upload=archive)

    for name, opened in ways.items():
        with opened as conversation:
            conversation.request("runs")
            for way, work in (("up", up), ("down", down)):
                spent = min(seconds(partial(work, conversation)) for _ in range(times))
                place.keep(f"{sized(size)} {way}, dflash-ops {name}, MiB/s", size / MIB / spent)


def container_bytes(place: Place, desk: Desk, size: int, times: int) -> None:
    """Into the container and back: ours streamed, and typed, as scp with pct push and pull, and through `pct exec`."""
    number, blob, node = str(place.rig.container_id), place.folder / "blob", f"/tmp/bench-{uuid.uuid4().hex[:8]}"
    blob.write_bytes(os.urandom(size))
    copy, inside = ["scp", *place.ssh_options], "/var/tmp/bench-blob"
    execute = ["pct", "exec", number, "--", "sh", "-c"]

    def push() -> None:
        quiet([*copy, str(blob), f"node:{node}"])
        quiet(place.ssh("pct", "push", number, node, inside))

    def pull() -> None:
        quiet(place.ssh("pct", "pull", number, inside, node))
        quiet([*copy, f"node:{node}", str(place.folder / "back")])

    def put() -> None:
        with blob.open("rb") as data:
            quiet(place.ssh(*execute, f"cat > {inside}"), stdin=data)

    def get() -> None:
        with (place.folder / "back").open("wb") as file:
            quiet(place.ssh(*execute, f"cat {inside}"), stdout=file)

    ways = {
        f"into the container, {PUT_WAYS[0]}": push,
        f"out of the container, {GET_WAYS[0]}": pull,
        f"into the container, {PUT_WAYS[1]}": put,
        f"out of the container, {GET_WAYS[1]}": get,
    }
    for name, way in ways.items():
        spent = min(seconds(way) for _ in range(times))
        place.keep(f"{sized(size)} {name}, MiB/s", size / MIB / spent)
    quiet(place.ssh("rm", "-f", node))
    host, _ = load_host("box", desk.folder / "hosts", env={}, last_host=None)
    run = desk.run("status").result["run"]
    path = f"{host.workdir}/runs/{run}/out/blob.bin"
    place.rig.exec_in_container(["mv", inside, path], check=True)
    with Session(host, Events(lambda event: None)) as session:
        our_bytes(place, {"to and from the container": session.open()}, run, size, times)
    place.rig.exec_in_container(["rm", path], check=True)


def logs(place: Place, session: Session, run: str, folder: Path, quick: bool) -> None:
    size = (2 if quick else 23) * MIB
    line = b"step 123 loss 1.2345 " + b"x" * 78 + b"\n"
    log = sorted((folder / "log").glob("*.log"))[-1]
    before = log.read_bytes()
    with log.open("ab") as file:
        file.write(line * (size // len(line)))
    count = 0

    def on_line(_: str) -> None:
        nonlocal count
        count += 1

    spent = seconds(lambda: follow(session, run, wait=False, on_line=on_line, on_step=lambda record: None))
    assert count >= size // len(line)
    place.keep(f"{size // MIB} MiB of log caught up, dflash-ops, s", spent)
    place.keep(f"{size // MIB} MiB of log, ssh cat, s", seconds(lambda: quiet(place.ssh("cat", str(log)))))
    if place.rtt_ms == 0:
        from fabric import Connection

        part = place.folder / "part.log"
        part.write_bytes(line * (2 * MIB // len(line)))
        keys = {"key_filename": str(place.rig.identity)}
        with Connection("127.0.0.1", user="root", port=place.port, connect_kwargs=keys) as node:
            place.keep("2 MiB of log, fabric.run, s", seconds(lambda: node.run(f"cat {part}", hide=True)))
    log.write_bytes(before)


def latency(place: Place, session: Session, run: str, folder: Path, lines: int) -> None:
    """From a line's write on the host to its arrival in `follow`, and in `ssh tail -f`, by one clock."""
    log = sorted((folder / "log").glob("*.log"))[-1]

    class EnoughError(Exception):
        pass

    def write() -> None:
        time.sleep(2)
        for _ in range(lines):
            with log.open("ab") as file:
                file.write(f"BENCH {time.time():.6f} \n".encode())
            time.sleep(0.083)

    def followed(on_line: Callable[[str], None]) -> None:
        follow(session, run, wait=True, on_line=on_line, on_step=lambda record: None)

    def tailed(on_line: Callable[[str], None]) -> None:
        argv = place.ssh("tail", "-n", "0", "-f", str(log))
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, bufsize=1) as tail:
            assert tail.stdout is not None
            try:
                for line in tail.stdout:
                    on_line(line)
            finally:
                tail.kill()

    for name, way in (("follow latency", followed), ("ssh tail -f latency", tailed)):
        seen: list[float] = []

        def on_line(line: str, seen: list[float] = seen) -> None:
            found = re.search(r"BENCH ([0-9.]+) ", line)
            if found:
                seen.append(time.time() - float(found.group(1)))
            if len(seen) == lines:
                raise EnoughError

        threading.Thread(target=write, daemon=True).start()
        with contextlib.suppress(EnoughError):
            way(on_line)
        ordered = sorted(seen)
        place.keep(f"{name} p50, ms", 1000 * ordered[len(ordered) // 2])
        place.keep(f"{name} p95, ms", 1000 * ordered[int(len(ordered) * 0.95)])


# ---- all of it


def measure(place: Place, steps: Callable[[], Steps], quick: bool) -> None:
    desk = Desk(Path(tempfile.mkdtemp(dir=place.folder)))
    # the others do not wait for the run's first steps either
    at_once = {"probation_steps": 0}
    desk.write_playbook(run=at_once)
    desk.write_playbook("slow", faults=("slow-steps",), training={"steps": 5000}, run=at_once)
    repeats = 1 if quick else 3
    our_deploys(place, desk, repeats)
    container_bytes(place, desk, (8 if quick else 64) * MIB, repeats)
    other_deploys(place, steps(), "fabric", by_fabric, repeats)
    if not (quick and place.rtt_ms):
        other_deploys(place, steps(), "ansible-core", by_ansible, repeats)
    sizes = {8 * MIB: 1} if quick else {64 * MIB: 1 if place.rtt_ms else 2, GIB: 1}
    for size, times in sizes.items():
        raw_bytes(place, size, times)
    work = place.folder / "work"
    desk.write_host("box", place.host_text("ssh", str(work)))
    done = desk.deploy("--detach", "--skip-canary", "--reason", "benchmark", playbook="slow")
    assert done.code == 0, done.out + done.err
    run = done.result["run"]
    host, _ = load_host("box", desk.folder / "hosts", env={}, last_host=None)
    try:
        with Session(host, Events(lambda event: None)) as session:
            latency(place, session, run, work / "runs" / run, 10 if quick else 60)
        assert desk.run("stop").code == 0
        with Session(host, Events(lambda event: None)) as session:
            logs(place, session, run, work / "runs" / run, quick)
            for size, times in sizes.items():
                blob = work / "runs" / run / "out" / "blob.bin"
                blob.write_bytes(os.urandom(size))
                systems = Conversation(SystemSsh(place), python=PYTHON, workdir=session.host.workdir, host="box")
                ways = {"over paramiko": session.open(), "over system ssh": systems}
                our_bytes(place, ways, run, size, times)
                blob.unlink()
    finally:
        desk.run("stop")


@contextlib.contextmanager
def reached(rig: Rig, rtt_ms: int, folder: Path) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(delayed(rig.port, rtt_ms)).port if rtt_ms else rig.port
        own = folder / f"{rtt_ms}ms"
        own.mkdir()
        (own / "known_hosts").write_text(rig.known_hosts.read_text().replace(f":{rig.port}", f":{port}"))
        yield Place(rig, rtt_ms, port, own)


def make_steps(folder: Path) -> Callable[[Place], Steps]:
    """The tiny trainer as an archive, and its settings: what the others bring."""
    import tarfile

    desk = Desk(folder / "plain")
    desk.folder.mkdir()
    desk.write_playbook()
    playbook = load_playbook(str(desk.folder / "playbooks" / "tiny.yaml"))
    settings = folder / "settings.json"
    settings.write_text(json.dumps(playbook.settings(run=None, prepared=None, cache="/tmp")))
    archive = folder / "a.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(ROOT / "tests" / "tiny_trainer", "tiny_trainer")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    return lambda place: Steps(place, archive, sha256, settings)


def ansible() -> str:
    if not (ANSIBLE / "bin" / "ansible-playbook").exists():
        quiet([PYTHON, "-m", "venv", str(ANSIBLE)])
        quiet([str(ANSIBLE / "bin" / "pip"), "install", "-q", "ansible-core"])
    told = subprocess.run([ANSIBLE / "bin" / "ansible", "--version"], capture_output=True, text=True, check=True)
    return told.stdout.splitlines()[0]


def versions() -> dict[str, str]:
    from importlib.metadata import version

    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr.strip()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "ssh": ssh,
        "ansible": ansible(),
        **{name: version(name) for name in ("paramiko", "fabric")},
    }


def table(figures: dict[str, dict[str, float]]) -> str:
    names = list(dict.fromkeys(name for column in figures.values() for name in column))
    head = f"| | {' | '.join(f'RTT {rtt} ms' for rtt in figures)} |\n|---|{'---|' * len(figures)}\n"
    rows = []
    for name in names:
        cells = [f"{column[name]:.3g}" if name in column else "" for column in figures.values()]
        rows.append(f"| {name} | {' | '.join(cells)} |\n")
    return head + "".join(rows)


def ratios(figures: dict[str, dict[str, float]]) -> str:
    """Each of the same run; over 1 is in our favour."""
    wanted: list[tuple[str, str, str]] = []
    for kind in ("no-change", "cold"):
        for other in ("ansible-core", "fabric"):
            names = (f"{kind} deploy, {other}, s", f"{kind} deploy, dflash-ops, s")
            wanted.append((f"{kind} deploy, time of {other} / dflash-ops", *names))
    for size in ("8 MiB", "64 MiB", "1 GiB"):
        for way in (f"{size} down", f"{size} up"):
            for over in ("paramiko", "system ssh"):
                for other in ("ssh cat", "scp"):
                    names = (f"{way}, dflash-ops over {over}, MiB/s", f"{way}, {other}, MiB/s")
                    wanted.append((f"{way}, rate of dflash-ops over {over} / {other}", *names))
        for way, where, others in (("up", "into", PUT_WAYS), ("down", "out of", GET_WAYS)):
            for other in others:
                ours, theirs = (
                    f"{size} {way}, dflash-ops to and from the container",
                    f"{size} {where} the container, {other}",
                )
                text = f"{size} {where} the container, rate of dflash-ops / {other}"
                wanted.append((text, f"{ours}, MiB/s", f"{theirs}, MiB/s"))
    found: dict[str, dict[str, float]] = {}
    for rtt, column in figures.items():
        found[rtt] = {name: column[a] / column[b] for name, a, b in wanted if a in column and b in column}
    return table(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="folder below benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="small sizes, once: to see that it works")
    parser.add_argument("--rtt", type=int, action="append", help="round trips in ms (default: 0, 20 and 80)")
    given = parser.parse_args()
    started = time.time()
    tools = versions()
    helps = [seconds(lambda: quiet([PYTHON, "-m", "dflash_ops", "--help"], cwd=ROOT)) for _ in range(5)]
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-wire-") as temporary:
        folder = Path(temporary)
        steps = make_steps(folder)
        rig = Rig()
        try:
            rig.up()
            for rtt_ms in given.rtt or (0, 20, 80):
                with reached(rig, rtt_ms, folder) as place:
                    measure(place, partial(steps, place), given.quick)
                    figures[str(rtt_ms)] = place.figures
        finally:
            rig.down()
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{platform.system()} {platform.release()}, {os.cpu_count()} cpus, load {os.getloadavg()[0]:.1f}",
        "command": f"python benchmarks/wire.py {shlex.join(sys.argv[1:])}",
        "took_s": round(time.time() - started),
        "versions": tools,
        "pct_startup_ms": PCT_STARTUP_MS,
        "help_s": round(statistics.median(helps), 3),
        "figures": figures,
    }
    out = ROOT / "benchmarks" / "results" / given.name
    out.mkdir(parents=True, exist_ok=True)
    (out / "wire.json").write_text(json.dumps(record, indent=2) + "\n")
    (out / "wire.md").write_text(
        f"# The wire, {record['date']}\n\n"
        f"`{record['command']}`, {record['took_s']} s. {record['machine']} (at the end).\n"
        f"{'; '.join(f'{name} {version}' for name, version in tools.items())}.\n"
        f"`pct` takes {PCT_STARTUP_MS} ms to start. All figures are of one run.\n\n"
        f"`dflash-ops --help`: {1000 * record['help_s']:.0f} ms (median of 5).\n\n"
        f"{table(figures)}\n## Ratios\n\nOver 1 is in our favour.\n\n{ratios(figures)}"
    )
    print((out / "wire.md").read_text())


if __name__ == "__main__":
    main()
