"""Assets of a playbook: what is too large for a release and must be the right thing all the same."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, model_validator

from dflash_ops.config.base import TEXT, Matches, Model

PREFIX = "asset:"
USERS = (("workload", "target"), ("training", "data"), ("training", "prompts"), ("training", "init_from"))
"""The settings that may name an asset."""


class Asset(Model):
    """A file or a folder: on the host (`path`), or here and brought there (`upload`)."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["path"]}, {"required": ["upload"]}]})

    path: Annotated[str, Matches(r"(/|~/)[^\x00-\x1f\x7f]*", "an absolute path, or one that begins with ~/")] | None = (
        None
    )
    """Where it lies on the host."""
    upload: Annotated[str, TEXT] | None = None
    """Where it lies on this machine, relative to this file; it is sent once."""
    sha256: Annotated[str, Matches(r"[0-9a-f]{64}", "64 lower-case hex digits")] | None = None
    """Its fingerprint, as `doctor` prints it. Left out: whatever is there is taken, and recorded."""

    @model_validator(mode="after")
    def _one_place(self) -> Asset:
        if (self.path is None) == (self.upload is None):
            raise ValueError("needs either path (on the host) or upload (on this machine)")
        return self
