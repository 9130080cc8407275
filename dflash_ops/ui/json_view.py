"""`--json`: one event a line on standard output, nothing else."""

from __future__ import annotations

import json
import sys

from dflash_ops.deploy.events import Event


def json_view(event: Event) -> None:
    sys.stdout.write(json.dumps(event, default=str) + "\n")
    sys.stdout.flush()
