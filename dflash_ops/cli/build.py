"""`dflash-ops build`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_ops.cli.common import OUTPUT_OPTIONS, PLAYBOOK_OPTIONS, command_end, options
from dflash_ops.deploy.events import Events


@click.command("build")
@options(PLAYBOOK_OPTIONS, OUTPUT_OPTIONS)
@click.option(
    "--out", type=click.Path(path_type=Path, resolve_path=True, dir_okay=False), help="Write the archive to this file."
)
@command_end
def command(*, events: Events, result: dict[str, Any], playbook: str, sets: tuple[str, ...], out: Path | None) -> None:
    """Build the release here; touch no host. Two builds of the same content are byte-identical.

    Example: dflash-ops build --playbook train --out release.tar.gz
    """
    from dflash_ops.config import load_playbook
    from dflash_ops.deploy.building import built
    from dflash_ops.files import write_bytes

    with built(load_playbook(playbook, sets=sets), events) as release:
        result.update(release=release.digest, archive=None)
        if out is not None:
            write_bytes(out, release.archive)
            result["archive"] = str(out)
            events.emit("notice", text=f"archive: {out}")
