"""The canary: the trainer proves itself here; the agent decides what that was worth, and what it is bound to."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from .arguments import Arguments
from .assets import refuse_changed
from .conversation import Conversation
from .errors import AgentError
from .files import read_json, remove_tree, tail_lines, write_json
from .jobs import Ending, Job, new_id, run_verb
from .leases import leased, refuse_if_busy
from .occupied import refuse_if_occupied
from .orphans import clear_orphans
from .refusals import KIND, REFUSED, Refusal
from .verdicts import Binding, Outcome, Verdict, VerdictStore, stamp
from .workdir import WorkDir

KEPT = 5
_DAY_S = 86400
_EXIT_CODES = {Outcome.PASS: 0, Outcome.FAIL: 6, Outcome.INCONCLUSIVE: 7}
# killed from outside says nothing about the workload
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


def op_canary(conversation: Conversation, args: Arguments) -> Dict[str, Any]:
    work = conversation.work
    conversation.lock.refuse_if_taken()
    job = Job.from_arguments(work, args)
    timeout_s, max_age_s = args.seconds("timeout_s", 900), args.seconds("max_age_s", _DAY_S)
    shared = args.optional_text("shared_gpus")
    refuse_if_busy(work, job.devices.names)
    clear_orphans(work)
    refuse_if_occupied(work, job.devices.names, shared)
    refuse_changed(work, job.assets)

    binding, store = stamp(work, job), VerdictStore.of(work)
    name = args.optional_run("name") or new_id()
    folder = work.canaries / name
    out = folder / "out"
    about = {"canary": name, "release": job.digest, "binding": binding.digest, "devices": binding.devices}
    with leased(work, folder, "canary", job.devices.names, job.playbook):
        store.begin(binding)
        out.mkdir(mode=0o700)
        work.record("canary_start", **about, playbook=job.playbook, shared_gpus=shared)
        ending = run_verb(conversation, job, "canary", name=name, folder=folder, out=out, timeout_s=timeout_s)
        why = _broken(ending, read_json(out / "evidence.json"))
        if why is not None:
            why = job.variables.masks.text(why)
            work.record("canary_again", **about, why=why)
            conversation.event("again", why=why)
            _set_aside(folder, out)
            ending = run_verb(conversation, job, "canary", name=name, folder=folder, out=out, timeout_s=timeout_s)

    if ending.code == REFUSED and not ending.deadline:
        # no verdict: nothing was proven of the workload, and what was refused may be none of it (its data, say)
        store.withdraw(binding)
        work.record("canary_end", **about, outcome=KIND)
        _prune(work, folder)
        lines = tail_lines(folder / "log")
        raise Refusal.read(out, lines, job.variables.masks).error("canary", lines)
    outcome, evidence = decide(ending, read_json(out / "evidence.json"), folder / "log")
    changed = _changed(args, work, binding)
    if changed is not None:
        outcome, evidence = Outcome.INCONCLUSIVE, {**evidence, "outcome": "inconclusive", "summary": changed}
    # a trainer's evidence quotes what went wrong: kept without the secrets that may stand in it
    evidence = job.variables.masks.value(evidence)
    verdict = Verdict.make(outcome, binding, max_age_s, evidence, log=f"canary/{name}/log", playbook=job.playbook)
    write_json(folder / "evidence.json", evidence)
    store.put(verdict)
    work.record("canary_end", **about, outcome=outcome.value)
    if outcome is Outcome.PASS:
        # the rehearsal's checkpoints are as large as a run's
        remove_tree(out)
    _prune(work, folder)
    return {"verdict": verdict.to_json()}


def _broken(ending: Ending, evidence: Optional[Dict[str, Any]]) -> Optional[str]:
    """Why this canary says nothing of the workload: its process broke, and a new one may answer."""
    undecided = ending.code == _EXIT_CODES[Outcome.INCONCLUSIVE] or ending.signal in _CRASHES
    if evidence is None or ending.deadline or not undecided or _claimed(evidence) is not Outcome.INCONCLUSIVE:
        return None
    why = evidence.get("again")
    return why if isinstance(why, str) and why else None


def _set_aside(folder: Path, out: Path) -> None:
    """Makes room for the second process; what the first one found stays beside it."""
    for path, kept in ((folder / "log", "log.first"), (out / "evidence.json", "evidence.first.json")):
        path.replace(folder / kept)
    remove_tree(out)
    out.mkdir(mode=0o700)


def decide(ending: Ending, evidence: Optional[Dict[str, Any]], log: Path) -> Tuple[Outcome, Dict[str, Any]]:
    """The contract's rules: evidence and exit code agree, or the way it died decides."""
    claimed = _claimed(evidence)
    if evidence is not None and claimed is not None and not ending.deadline and ending.code == _EXIT_CODES[claimed]:
        return claimed, evidence
    outside = ending.deadline or ending.signal in _FROM_OUTSIDE
    # it came to its end and yet gave no answer that can be believed
    no_answer = ending.code in (_EXIT_CODES[Outcome.PASS], _EXIT_CODES[Outcome.INCONCLUSIVE])
    outcome = Outcome.INCONCLUSIVE if outside or no_answer else Outcome.FAIL
    if evidence is None:
        said = "left no evidence"
    elif claimed is None:
        said = "left evidence without a valid outcome"
    else:
        said = f"left evidence that says {claimed.value!r}"
    made = {
        "contract": 1,
        "outcome": outcome.value,
        "summary": f"the canary {ending.describe()} and {said}",
        "checks": (evidence or {}).get("checks", []),
        "figures": (evidence or {}).get("figures", {}),
        "log_tail": tail_lines(log),
    }
    return outcome, made


def _claimed(evidence: Optional[Dict[str, Any]]) -> Optional[Outcome]:
    try:
        return None if evidence is None else Outcome(evidence.get("outcome"))
    except ValueError:
        return None


def _changed(args: Arguments, work: WorkDir, before: Binding) -> Optional[str]:
    """What changed while the canary ran, in words; None when all is as before."""
    try:
        after = stamp(work, Job.from_arguments(work, args))
    except AgentError as error:
        return f"while the canary ran, something changed: {error.what}"
    differences = after.differences(vars(before))
    return f"while the canary ran, the host changed: it was {' and '.join(differences)} before" if differences else None


def _prune(work: WorkDir, newest: Path) -> None:
    """A name's time is its workstation's: it says nothing of which came last here."""
    others = [folder for folder in work.canaries.iterdir() if folder != newest]
    for folder in sorted(others, key=lambda path: path.lstat().st_mtime, reverse=True)[KEPT - 1 :]:
        remove_tree(folder)
