"""The commands, with the words, streams and exit statuses of pve-container 6.1.10."""

# Imports inside functions keep `pct exec` quick: this file is run for every call.

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pctlib import attach
from pctlib.arguments import Command, Parsed, parse
from pctlib.containers import Containers
from pctlib.errors import PctError
from pctlib.lock import config_lock

# The CLI sets its own PATH before anything else (PVE::CLIHandler).
PATH = "/sbin:/bin:/usr/sbin:/usr/bin"
OWNERSHIP_OPTIONS = ("user", "group", "perms")


def status(containers: Containers, given: Parsed) -> None:
    containers.config(given.vmid)
    if given.options.get("verbose", "0") != "0":
        for key, value in containers.figures(given.vmid).items():
            print(f"{key}: {value}")
    else:
        print("status:", "running" if containers.running(given.vmid) else "stopped")


def list_all(containers: Containers, given: Parsed) -> None:
    rows = [
        (vmid, "running" if containers.running(vmid) else "stopped", "", containers.config(vmid)["hostname"])
        for vmid in containers.ids()
    ]
    for row in [("VMID", "Status", "Lock", "Name"), *rows] if rows else []:
        print("{:<10} {:<10} {:<12} {:<20}".format(*row))


def config(containers: Containers, given: Parsed) -> None:
    for key, value in containers.config(given.vmid).items():
        print(f"{key}: {value}")


def execute(containers: Containers, given: Parsed) -> None:
    containers.config(given.vmid)
    if not given.extra:
        raise PctError("missing command at /usr/share/perl5/PVE/CLI/pct.pm line 246.")
    if not containers.running(given.vmid):
        raise PctError(f"container '{given.vmid}' not running!")
    attach.run(
        containers.lxc_path,
        containers.lxc_name(given.vmid),
        given.extra,
        keep_environment=given.options.get("keep-env", "1") != "0",
    )


def push(containers: Containers, given: Parsed) -> None:
    from pctlib import files

    with config_lock(given.vmid):
        if not containers.running(given.vmid):
            raise PctError("can only push files to a running CT")
        unprivileged = containers.config(given.vmid).get("unprivileged") == "1"
        source, destination = given.positional
        files.push(containers.pid(given.vmid), unprivileged, source, destination, files.Ownership(*ownership(given)))


def pull(containers: Containers, given: Parsed) -> None:
    from pctlib import files

    with config_lock(given.vmid):
        if not containers.running(given.vmid):
            raise PctError("can only pull files from a running VM at /usr/share/perl5/PVE/CLI/pct.pm line 664.")
        source, destination = given.positional
        files.pull(containers.pid(given.vmid), source, destination, files.Ownership(*ownership(given)))


def ownership(given: Parsed) -> list[str | None]:
    return [given.options.get(name) for name in OWNERSHIP_OPTIONS]


def start(containers: Containers, given: Parsed) -> None:
    settings = containers.config(given.vmid)
    with config_lock(given.vmid):
        if containers.running(given.vmid):
            raise PctError(f"CT {given.vmid} already running")
        if not containers.has_volume(given.vmid):
            volume = settings["rootfs"].partition(",")[0]
            raise PctError(f"volume '{volume}' does not exist")
        lxc(containers, given.vmid, "lxc-start")


def stop(containers: Containers, given: Parsed) -> None:
    containers.config(given.vmid)
    with config_lock(given.vmid):
        if not containers.running(given.vmid):
            raise PctError(f"CT {given.vmid} not running")
        lxc(containers, given.vmid, "lxc-stop", "--kill")


def lxc(containers: Containers, vmid: str, tool: str, *options: str) -> None:
    import subprocess

    name = containers.lxc_name(vmid)
    folder = containers.lxc_path / name
    done = subprocess.run(
        [tool, "-P", str(containers.lxc_path), "-n", name, "-l", "WARN", "-o", str(folder / "lxc.log"), *options],
        check=False,
    )
    if done.returncode:
        raise PctError(f"command '{tool} -n {vmid}' failed: exit code {done.returncode}")


OF_VMID = "<vmid> [OPTIONS]"
COMMANDS: dict[str, tuple[Command, Callable[[Containers, Parsed], None]]] = {
    "status": (Command(f"pct status {OF_VMID}", flags=("verbose",)), status),
    "list": (Command("pct list ", takes_vmid=False), list_all),
    "config": (Command(f"pct config {OF_VMID}"), config),
    "exec": (Command("pct exec <vmid> [<extra-args>] [OPTIONS]", flags=("keep-env",), extra=True), execute),
    "push": (
        Command("pct push <vmid> <file> <destination> [OPTIONS]", 2, options=OWNERSHIP_OPTIONS),
        push,
    ),
    "pull": (
        Command("pct pull <vmid> <path> <destination> [OPTIONS]", 2, options=OWNERSHIP_OPTIONS),
        pull,
    ),
    "start": (Command(f"pct start {OF_VMID}"), start),
    "stop": (Command(f"pct stop {OF_VMID}"), stop),
}


def main(state: Path, words: list[str]) -> int:
    time.sleep(int(os.environ.pop("PCT_STARTUP_MS", "0")) / 1000)
    os.environ["PATH"] = PATH
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        os.environ.pop(name, None)
    try:
        if not words or words[0] not in COMMANDS:
            what = f"unknown command 'pct {words[0]}'" if words else "no command specified"
            usage = Path(__file__).with_name("usage.txt").read_text()
            raise PctError(f"ERROR: {what}\n{usage}")
        command, run = COMMANDS[words[0]]
        run(Containers(state), parse(command, words[1:]))
    except PctError as error:
        sys.stdout.flush()
        print(error.message.rstrip("\n"), file=sys.stderr)
        return error.status
    return 0
