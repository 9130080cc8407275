"""`dflash-ops check`"""

from __future__ import annotations

from typing import Any

import click

from dflash_ops.cli.common import OUTPUT_OPTIONS, PLAYBOOK_OPTIONS, command_end, options
from dflash_ops.deploy.events import Events


@click.command("check")
@options(PLAYBOOK_OPTIONS, OUTPUT_OPTIONS)
@command_end
def command(*, events: Events, result: dict[str, Any], playbook: str, sets: tuple[str, ...]) -> None:
    """Syntax and compile-safety rules over the release that the playbook builds.

    The target's own Python parses it again when it is staged.

    Example: dflash-ops check --playbook train
    """
    from dflash_ops.config import load_playbook
    from dflash_ops.deploy.building import built, checked

    with built(load_playbook(playbook, sets=sets), events) as release:
        result["release"] = release.digest
        result["findings"] = len(checked(release, events, anew=True))
