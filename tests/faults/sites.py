"""One host for one fault run: how it is reached, where its files are seen from here, and which processes live there."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.commands import Desk
from tests.faults.link import Link
from tests.rig.rig import Rig
from tests.typist import Command, Typist, wait_until

WAYS = ("local", "ssh", "pct-stream", "pct-push")
BEAT_S = 2.0
"""Of the commands that meet a fault. A dead link is noticed after three, and a machine that is busy is none."""
TMPFS_BYTES = 4 << 30
TRAINING = {"steps": 8, "checkpoint_every": 3}


@dataclass
class Ground:
    """What fault runs share: the typist, the rig (asked for when it is needed), and a work directory of each kind of
    host in which a deploy has been."""

    folder: Path
    typist: Typist
    rig: Callable[[], Rig]

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._templates: dict[str, str] = {}

    @contextmanager
    def site(self, way: str, *, proven: bool, with_run: bool, small_disk: bool) -> Iterator[Site]:
        """A host of its own; `proven`: with a release staged there and a verdict that holds; `with_run`: also with a
        run that has ended."""
        template = self._template(way) if proven else None
        with ExitStack() as stack:
            site = self._empty(way, stack, small_disk=small_disk)
            if template is not None:
                site.shell(f"cp -a {template} {site.workdir}")
                if not with_run:
                    site.shell(f"rm -rf {site.workdir}/runs {site.workdir}/events.ndjson")
            yield site

    def _empty(self, way: str, stack: ExitStack, *, small_disk: bool = False) -> Site:
        number = next(self._numbers)
        folder = self.folder / f"{number:03d}"
        folder.mkdir()
        rig = None if way == "local" else self.rig()
        # processes are found by this name from outside the containers, and each xdist worker has a container
        in_container = way.startswith("pct") and rig is not None
        parent = f"/var/lib/{rig.folder.name}-{number:03d}" if in_container else str(folder / "host")
        link = stack.enter_context(Link(rig.port)) if rig is not None else None
        site = Site(way, Desk(folder), parent, self.typist, rig, link)
        stack.callback(site.clear)
        site.shell(f"mkdir {parent}")
        if small_disk:
            site.shell(f"mount -t tmpfs -o size={TMPFS_BYTES} tmpfs {parent}")
            stack.callback(site.shell, f"umount --lazy {parent}")
        site.describe()
        return site

    def _template(self, way: str) -> str:
        """A work directory after one deploy, to be copied."""
        place = way.partition("-")[0]
        if place not in self._templates:
            stack = ExitStack()
            site = self._empty(way, stack)
            done = site.type("deploy", "--playbook", "tiny").ended
            assert done.code == 0, done.out + done.err
            kept = f"{site.parent}.template"
            site.shell(f"mv {site.workdir} {kept}")
            stack.close()
            self._templates[place] = kept
        return self._templates[place]


@dataclass
class Site:
    way: str
    desk: Desk
    parent: str
    """On the host: the folder that holds the work directory."""
    typist: Typist
    rig: Rig | None
    link: Link | None

    @property
    def workdir(self) -> str:
        return f"{self.parent}/work"

    @property
    def temporary(self) -> Path:
        """The workstation's, for the commands of this run alone."""
        return self.desk.folder / "tmp"

    @property
    def in_container(self) -> bool:
        return self.way.startswith("pct")

    def describe(self) -> None:
        """Writes the inventory, with two names for the host (`box` is direct, `shaky` through the link), and the
        playbook."""
        direct = f"transport: {self.way.partition('-')[0]}\npython: {sys.executable}\nworkdir: {self.workdir}\n"
        ways = {"box": direct}
        if self.rig is not None and self.link is not None:
            container = (
                f"pct:\n  id: {self.rig.container_id}\n  transfer: {self.way.partition('-')[2]}\n"
                # streamed past pct, pushed through it alone
                + (f"  command: {self.rig.folder / 'sbin' / 'pct'}\n" if self.way == "pct-push" else "")
            )
            for name, port in (("box", self.rig.port), ("shaky", self.link.port)):
                ways[name] = (
                    f"{direct}ssh:\n  address: 127.0.0.1\n  port: {port}\n  user: root\n"
                    f"  identity_file: {self.rig.identity}\n  fingerprint: {self.rig.host_key_fingerprint}\n"
                    + (container if self.in_container else "")
                )
        for name, text in ways.items():
            self.desk.write_host(name, text)
        self.desk.write_playbook(faults=("slow-steps",), training=TRAINING)
        for folder in (self.desk.folder / "said", self.temporary):
            folder.mkdir()

    def type(self, *words: str, shaky: bool = False, beat: float | None = None) -> Command:
        """A command with `--json`; `shaky`: over the link that may break."""
        host = "shaky" if shaky and self.link is not None else "box"
        return self.typist.type(
            [*words, "--json", "--host", host],
            cwd=self.desk.folder,
            environment={**self.desk.env(), "TMPDIR": str(self.temporary)},
            output=self.desk.folder / "said",
            beat=beat,
        )

    def shell(self, script: str) -> str:
        """Runs on the host, past everything of ours."""
        if self.in_container and self.rig is not None:
            done = self.rig.exec_in_container(["sh", "-ec", script])
        else:
            done = subprocess.run(["sh", "-ec", script], check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"{script}: status {done.returncode}, {done.stderr}"
        return done.stdout

    # what lies there

    def view(self, path: str = "") -> Path:
        """Where a path below the work directory is seen from here."""
        return self._root() / Path(self.workdir, path).relative_to("/")

    @property
    def clock_folder(self) -> Path:
        return self._root() / self.parent.lstrip("/")

    def _root(self) -> Path:
        if not self.in_container:
            return Path("/")
        return Path(f"/proc/{self._container_init()}/root")

    def _container_init(self) -> int:
        """The container's PID 1, by the PID that it has here."""
        assert self.rig is not None
        name = f"{self.rig.folder.name}-{self.rig.container_id}"
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if "systemd" not in (folder / "comm").read_text() or name not in (folder / "cgroup").read_text():
                    continue
                if (folder / "status").read_text().split("NSpid:")[1].splitlines()[0].split()[-1] == "1":
                    return int(folder.name)
            except OSError:
                continue
        raise AssertionError("the container is not running")

    def runs(self) -> list[str]:
        """Runs that were begun, in the order of their launch."""
        folder = self.view("runs")
        begun = [path.parent for path in folder.glob("*/run.json")]
        return [path.name for path in sorted(begun, key=lambda path: (path / "settings.json").stat().st_mtime_ns)]

    def take_room(self) -> None:
        """Makes the small disk as small as what lies on it; what is written meanwhile may come in between."""
        used = f"$(df --block-size=1 --output=used {self.parent} | tail -n 1)"
        self.shell(f"for _ in $(seq 100); do {self._resize(f'$(( {used} + 4096 ))')} 2>/dev/null && exit; done; exit 1")

    def give_room(self) -> None:
        self.shell(self._resize(str(TMPFS_BYTES)))

    def _resize(self, size: str) -> str:
        # in full: without type and source mount looks for them where a container has nothing
        return f"mount -t tmpfs -o remount,size={size} tmpfs {self.parent}"

    # what lives there

    def processes(self) -> Iterator[tuple[int, list[str]]]:
        """(pid, argv) of all that was started in this work directory."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any(self.workdir in word for word in argv):
                yield int(folder.name), argv

    def agents(self) -> list[int]:
        return [pid for pid, argv in self.processes() if "serve" in argv and self.workdir in argv]

    def supervisors(self) -> list[int]:
        found = self._supervision()
        return [pid for pid, parent in found.items() if parent not in found]

    def pumps(self) -> list[int]:
        """The processes beside the supervisors through which a run's output goes into its log."""
        found = self._supervision()
        return [pid for pid, parent in found.items() if parent in found]

    def _supervision(self) -> dict[int, int]:
        """pid to parent"""
        found = {}
        for pid, argv in self.processes():
            if "supervise" in argv:
                with contextlib.suppress(OSError):
                    found[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return found

    def jobs(self) -> list[int]:
        return [pid for pid, argv in self.processes() if "tiny_trainer" in argv]

    def living_runs(self) -> set[str]:
        """Runs of which a process lives."""
        root, found = f"DFLASH_OPS_WORKDIR={self.workdir}".encode(), set()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                if root not in environment or (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                    continue
            except OSError:
                continue
            found |= {value[15:].decode() for value in environment if value.startswith(b"DFLASH_OPS_RUN=")}
        return found

    def clear(self) -> None:
        """Ends what still lives and removes what lies on the host."""
        for pid, _ in self.processes():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        wait_until(lambda: not self.living_runs(), f"processes of {self.workdir} die")
        self.shell(f"chmod -R u+rwX {self.parent} && rm -rf {self.parent}")

    def said(self) -> str:
        """All that was typed and came back, for the report of a failure."""
        texts = []
        for path in sorted((self.desk.folder / "said").iterdir()):
            lines = path.read_text(errors="replace").splitlines()
            texts += [f"--- {path.name}", *(line[:300] for line in lines if '"event": "log"' not in line)]
        events = self.view("events.ndjson")
        texts += ["--- events.ndjson of the host", events.read_text() if events.exists() else "(none)"]
        return "\n".join(texts)


def read_json(path: Path) -> dict[str, object] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
