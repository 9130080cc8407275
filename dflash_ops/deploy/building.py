"""Build and static check: what happens on the workstation before any host is touched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_ops.config import Playbook
from dflash_ops.deploy.events import Events
from dflash_ops.deploy.scratch import scratch_folder
from dflash_ops.errors import ExitCode, OpsError
from dflash_ops.release import CheckMemory, Finding, Release, ReleaseError, Source, build, finding_dict, left_out


def source_of(playbook: Playbook) -> Source:
    trainer = playbook.trainer
    # the bundled trainer of a checkout is built from git like any other; an installed one has no git behind it
    checkout = (trainer.folder.parent / ".git").exists()
    return Source(path=trainer.folder, include=tuple(trainer.include), bundled=trainer.is_bundled and not checkout)


@contextmanager
def built(playbook: Playbook, events: Events) -> Iterator[Release]:
    """The playbook's release, in a folder that goes away with the block. Raises OpsError (exit 3)."""
    with scratch_folder() as folder:
        source = source_of(playbook)
        try:
            release = build(
                source,
                [Path(patch) for patch in playbook.trainer.patches],
                settings={"module": playbook.trainer.module},
                out=folder / "tree",
            )
            out = left_out(source)
        except ReleaseError as error:
            raise OpsError(
                error.what, exit_code=ExitCode.REFUSED, kind="build", where=error.where, fix=error.fix
            ) from error
        manifest = release.manifest
        events.emit(
            "built",
            release=release.digest,
            files=len(manifest.files),
            bytes=len(release.archive),
            source=str(source.path),
            commit=manifest.source.commit,
            dirty=list(manifest.source.dirty),
            left_out=list(out),
            patches=[patch.name for patch in manifest.patches],
        )
        yield release


def checked(release: Release, events: Events, *, anew: bool = False) -> list[Finding]:
    """Static rules over the built tree; every finding is an event. Raises OpsError (exit 3) when one is an error.

    What they found in exactly this content before is remembered, unless they are asked `anew`.
    """
    memory = CheckMemory.at(os.environ)
    found = None if anew else memory.recall(release.digest)
    findings = _found(release, memory) if found is None else found
    for finding in findings:
        events.emit("finding", **finding_dict(finding))
    refused = [finding for finding in findings if finding.blocks]
    remembered = found is not None
    events.emit("checked", release=release.digest, findings=len(findings), refused=len(refused), remembered=remembered)
    if refused:
        first = refused[0]
        raise OpsError(
            first.why if len(refused) == 1 else f"{first.why} (and {len(refused) - 1} more findings)",
            exit_code=ExitCode.REFUSED,
            kind="check",
            where=f"{first.path}:{first.line}",
            fix=first.fix,
        )
    return findings


def _found(release: Release, memory: CheckMemory) -> list[Finding]:
    from dflash_ops.release import check

    findings = check(release.tree, python=None)
    memory.keep(release.digest, findings)
    return findings
