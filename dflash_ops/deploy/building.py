"""Build and static check: what happens on the workstation before any host is touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from dflash_ops.config import Playbook
from dflash_ops.deploy.events import Events
from dflash_ops.errors import ExitCode, OpsError
from dflash_ops.release import Finding, Release, ReleaseError, Source, build, check, finding_dict


def source_of(playbook: Playbook) -> Source:
    trainer = playbook.trainer
    # the bundled trainer of a checkout is built from git like any other; an installed one has no git behind it
    checkout = (trainer.folder.parent / ".git").exists()
    return Source(path=trainer.folder, include=tuple(trainer.include), bundled=trainer.is_bundled and not checkout)


@contextmanager
def built(playbook: Playbook, events: Events) -> Iterator[Release]:
    """The playbook's release, in a folder that goes away with the block. Raises OpsError (exit 3)."""
    with TemporaryDirectory(prefix="dflash-ops-build-") as folder:
        try:
            release = build(
                source_of(playbook),
                [Path(patch) for patch in playbook.trainer.patches],
                settings={"module": playbook.trainer.module},
                out=Path(folder) / "tree",
            )
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
            source=str(source_of(playbook).path),
            commit=manifest.source.commit,
            dirty=list(manifest.source.dirty),
            patches=[patch.name for patch in manifest.patches],
        )
        yield release


def checked(release: Release, events: Events) -> list[Finding]:
    """Static rules over the built tree; every finding is an event. Raises OpsError (exit 3) when one is an error."""
    findings = check(release.tree, python=None)
    for finding in findings:
        events.emit("finding", **finding_dict(finding))
    refused = [finding for finding in findings if finding.blocks]
    events.emit("checked", release=release.digest, findings=len(findings), refused=len(refused))
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
