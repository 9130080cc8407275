"""A checkpoint of a run of this host that another run is to begin with: its weights only."""

from __future__ import annotations

from typing import Any, Dict

from .arguments import Arguments
from .checkpoints import finite_up_to
from .collect import checkpoints
from .conversation import Conversation
from .errors import AgentError, ExitCode
from .retention import pin
from .runs import find_run


def op_checkpoint(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    """The complete checkpoint of `step`, or the newest; it stays while this conversation lives.

    After a loss that is none those that are younger do not count.
    AgentError `no_checkpoint` names those that are there.
    """
    folder = find_run(conversation.work, args.optional_run())
    wanted = None if args.values.get("step") is None else args.size("step")
    bound = finite_up_to(folder)
    there = [one for one in checkpoints(folder) if bound is None or one.step <= bound]
    found = [one for one in there if wanted is None or one.step == wanted]
    if not found or pin(folder, [found[-1].path.name]) == []:
        which = "no checkpoint" if wanted is None else f"no checkpoint of step {wanted}"
        steps = [str(one.step) for one in there]
        raise AgentError(
            "no_checkpoint",
            f"run {folder.run} has {which}" + ("" if bound is None else f" up to step {bound}, its last finite loss"),
            str(folder.out / "checkpoints"),
            f"name one of its steps: {', '.join(steps)}" if steps else "choose another run: dflash-ops runs",
            ExitCode.USAGE,
            steps,
        )
    return {"run": folder.run, "path": str(found[-1].path), "step": found[-1].step}
