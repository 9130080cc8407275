"""What the node knows about its containers: configuration, state, figures."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from pctlib.errors import PctError


class Containers:
    """The containers of one rig.

    `state` is the rig's folder: `pve/ID.conf` is a container's configuration, `lxc/` is LXC's path, and container ID
    is called `NAME-ID` there, NAME being the folder's own name.
    """

    def __init__(self, state: Path) -> None:
        self.lxc_path = state / "lxc"
        self._conf = state / "pve"
        self._prefix = state.name

    def lxc_name(self, vmid: str) -> str:
        return f"{self._prefix}-{vmid}"

    def config(self, vmid: str) -> dict[str, str]:
        """The configuration, sorted by key; PctError with status ENOENT when this node has none."""
        try:
            text = (self._conf / f"{vmid}.conf").read_text()
        except FileNotFoundError:
            node = os.uname().nodename.split(".")[0]
            message = f"Configuration file 'nodes/{node}/lxc/{vmid}.conf' does not exist"
            raise PctError(message, errno.ENOENT) from None
        pairs = (line.partition(":") for line in text.splitlines() if line.strip())
        return dict(sorted((key.strip(), value.strip()) for key, _, value in pairs))

    def ids(self) -> list[str]:
        return sorted((path.stem for path in self._conf.glob("*.conf")), key=int)

    def running(self, vmid: str) -> bool:
        """Whether LXC's command socket is open: how PVE::LXC itself tells."""
        wanted = f"@{self.lxc_path}/{self.lxc_name(vmid)}/command"
        with open("/proc/net/unix") as sockets:
            return any(line.rstrip("\n").endswith(f" {wanted}") for line in sockets)

    def has_volume(self, vmid: str) -> bool:
        return (self.lxc_path / self.lxc_name(vmid) / "upper").is_dir()

    def pid(self, vmid: str) -> int:
        """PID of the container's init, in the node's numbering."""
        told = self._lxc_tells("lxc-info", vmid, "-p", "-H")
        if not told.strip().isdecimal():
            raise PctError(f"unable to get PID for CT {vmid} (not running?)")
        return int(told)

    def figures(self, vmid: str) -> dict[str, str | int]:
        """`pct status --verbose`, sorted by key; bytes and seconds."""
        config = self.config(vmid)
        running = self.running(vmid)
        figures: dict[str, str | int] = {
            "cpus": int(config["cores"]),
            "disk": 0,
            "diskread": 0,
            "diskwrite": 0,
            "maxdisk": 0,
            "maxmem": int(config["memory"]) << 20,
            "maxswap": int(config["swap"]) << 20,
            "mem": 0,
            "name": config["hostname"],
            "netin": 0,
            "netout": 0,
            "status": "running" if running else "stopped",
            "swap": 0,
            "type": "lxc",
            "uptime": 0,
            "vmid": vmid,
        }
        if running:
            pid = self.pid(vmid)
            disk = os.statvfs(f"/proc/{pid}/root")
            figures["pid"] = pid
            figures["maxdisk"] = disk.f_blocks * disk.f_frsize
            figures["disk"] = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            figures["uptime"] = _uptime_s(pid)
            figures["netin"], figures["netout"] = _network_bytes(pid)
            figures["diskread"], figures["diskwrite"] = self._disk_bytes(vmid)
            figures["mem"] = self._cgroup(vmid, "memory.usage_in_bytes", "memory.current")
            figures["swap"] = self._cgroup(vmid, "memory.swap.current")
        return dict(sorted(figures.items()))

    def _lxc_tells(self, tool: str, vmid: str, *words: str) -> str:
        import subprocess  # costs `pct exec`, which asks nothing, 6 ms

        asked = subprocess.run(
            [tool, "-P", str(self.lxc_path), "-n", self.lxc_name(vmid), *words],
            capture_output=True,
            text=True,
            check=False,
        )
        return asked.stdout

    def _cgroup(self, vmid: str, *keys: str) -> int:
        """The first of `keys` that this kernel's cgroups have (v1 and v2 name them differently), else 0."""
        for key in keys:
            text = self._lxc_tells("lxc-cgroup", vmid, key).strip()
            if text.isdecimal():
                return int(text)
        return 0

    def _disk_bytes(self, vmid: str) -> tuple[int, int]:
        text = self._lxc_tells("lxc-cgroup", vmid, "blkio.throttle.io_service_bytes")
        fields = [line.split() for line in text.splitlines()]
        totals = {
            operation: sum(int(field[2]) for field in fields if len(field) == 3 and field[1] == operation)
            for operation in ("Read", "Write")
        }
        return totals["Read"], totals["Write"]


def _uptime_s(pid: int) -> int:
    started_ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return int(up_s - started_ticks / os.sysconf("SC_CLK_TCK"))


def _network_bytes(pid: int) -> tuple[int, int]:
    received = sent = 0
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]:
        device, _, rest = line.partition(":")
        if device.strip() != "lo":
            received += int(rest.split()[0])
            sent += int(rest.split()[8])
    return received, sent
