"""What an agent says, as far as it can be believed: JSON objects, and run names that are names."""

from __future__ import annotations

import json
from typing import Any

from dflash_ops.errors import TransportError


def parse_message(payload: bytes | str, where: str) -> dict[str, Any]:
    """The object in a `J` frame. Raises TransportError: after anything else nothing from there makes sense."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise nonsense(f"not JSON: {error}", where) from error
    if not isinstance(value, dict):
        raise nonsense("no JSON object", where)
    if "event" not in value and value.get("ok") and not isinstance(value.get("result"), dict):
        raise nonsense("an answer without a result", where)
    if "event" not in value and not value.get("ok") and not isinstance(value.get("error"), dict):
        raise nonsense("neither an answer nor an error", where)
    return value


def nonsense(what: str, where: str) -> TransportError:
    """The error for what no agent of ours says; `what` goes on after "what came from the agent there is"."""
    return TransportError(
        f"what came from the agent there is {what}",
        kind="protocol",
        where=where,
        fix="is that host what it should be? its Python and its login shell must print nothing of their own",
    )
