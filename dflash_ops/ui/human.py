"""The people's view: one line a state change, log lines as they are, tables where a table reads better."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_ops.deploy.amounts import number, sized
from dflash_ops.deploy.endings import why
from dflash_ops.deploy.events import Event
from dflash_ops.deploy.holder_lines import lease_line, lock_line, occupied_line
from dflash_ops.deploy.lines import gist
from dflash_ops.deploy.pipeline import bottleneck
from dflash_ops.deploy.times import utc
from dflash_ops.deploy.tuning import COLUMNS, rows
from dflash_ops.ui.plain import plain_value

MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warn[/]", "blocker": "[red]stop[/]"}
LOGGED_LINES = 500
LONGEST_SAID = 200
FEW = 5
OUTCOMES = {
    "pass": "[green]pass[/]",
    "warn": "[yellow]warn[/]",
    "fail": "[bold red]fail[/]",
    "inconclusive": "[yellow]inconclusive[/]",
    "not_checked": "[dim]not checked[/]",
}


class HumanView:
    """Progress goes to standard error, logs (what one pipes) to standard output."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
        self._logged: deque[str] = deque(maxlen=LOGGED_LINES)
        """The last log lines on standard error: an error's evidence is often their end."""
        self._views: dict[str, Callable[[Event], None]] = {
            "plan": self._plan,
            "chosen": lambda e: self._say(f"host [bold]{escape(e['host'])}[/] ({escape(e['why'])})"),
            "notice": lambda e: self._say(f"[yellow]note[/] {escape(e['text'])}"),
            "built": self._built,
            "finding": self._finding,
            "checked": lambda e: self._say(
                f"check    {e['findings'] or 'nothing'} found"
                + (f", {number(e['refused'], 'error')}" if e["refused"] else "")
                + (" (remembered: nothing of it has changed)" if e["remembered"] else "")
            ),
            "connected": lambda e: self._say(
                f"connect  {escape(e['host'])}: {escape(e['hostname'])}, work directory {escape(e['workdir'])}"
            ),
            "staged": self._staged,
            "activated": lambda e: self._say(
                f"stage    {e['release'][:12]} is current; its {e['files']} files compile under the host's Python"
            ),
            "building": lambda e: self._say(
                f"packages environment {e['environment'][:12]} of {number(e['packages'], 'package')} is made on "
                f"{escape(e['host'])}" + ("" if e["begun"] else " already: following")
            ),
            "environment": lambda e: self._say(
                f"packages environment [bold]{e['environment'][:12]}[/] {'already there' if e['reused'] else 'made'}"
            ),
            "diagnosis": self._diagnosis,
            "sending": lambda e: self._say(
                f"doctor   asset {escape(e['asset'])}: sending {number(e['files'], 'file')}, {sized(e['bytes'])}"
            ),
            "sending_on": lambda e: self._say(
                f"doctor   asset {escape(e['asset'])}: {e['files']} of {number(e['of_files'], 'file')}, "
                f"{sized(e['bytes'])} of {sized(e['of_bytes'])}"
            ),
            "sent": lambda e: self._say(
                f"doctor   asset {escape(e['asset'])}: {sized(e['bytes'])} sent, verified as a whole"
            ),
            "asking": lambda e: self._say(f"doctor   asking {escape(e['what'])}"),
            "preparing": lambda e: self._say(f"prepare  {escape(e['why'])}"),
            "prepared": lambda e: self._say(
                f"prepare  {'already there' if e['reused'] else 'done'}: {escape(e['path'])}"
            ),
            "tuning": lambda e: self._say(f"tune     measures every strategy: {escape(e['why'])}"),
            "tuned": lambda e: self._tuned(e["table"]),
            "canary": lambda e: self._say(f"canary   runs: {escape(e['why'])}"),
            "verdict": self._verdict,
            "launched": self._launched,
            "probation": self._probation,
            "log": self._log,
            "progress": self._progress,
            "link_lost": lambda e: self._say(
                f"[yellow]link[/]     {escape(e['what'])}; again in {e['again_in_s']} s ({escape(e['then'])})"
            ),
            "waiting": lambda e: self._say(f"wait     run {escape(str(e['run']))} goes on"),
            "starts_again": lambda e: self._say(
                f"restart  run {escape(str(e['run']))} ended {escape(str(e['state']))}; its host starts it again at "
                f"{utc(e['due'])} ({e['left']} more after that)"
            ),
            "disk_low": lambda e: self._say(f"[yellow]warn[/]     {escape(str(e['what']))}"),
            "restarted": lambda e: self._say(
                f"restart  its host started it again as run [bold]{escape(str(e['child']))}[/] ({e['left']} more left)"
            ),
            "not_restarted": lambda e: self._say(
                f"restart  run {escape(str(e['run']))} is not started again: {escape(str(e['why']))}"
            ),
            "ended": self._ended,
            "next": lambda e: self._say(f"  next   {escape(e['what'])}"),
            "checkpoint": lambda e: self._say(f"collect  {escape(e['path'])} verified ({sized(e['bytes'])})"),
            "collected": self._collected,
            "comparing": lambda e: self._say(
                f"prune    comparing {number(e['runs'], 'old run')} there with those in {escape(e['folder'])}"
            ),
            "prune": self._prune,
            "pruned": lambda e: self._say(
                f"prune    {sized(e['freed_bytes'])} {'would be free' if e['dry_run'] else 'freed'}, "
                f"{sized(e['kept_bytes'])} kept"
            ),
            "damaged": lambda e: self._say(
                f"[yellow]warn[/]     the checkpoint {escape(str(e['path']))} is passed over: {escape(str(e['why']))}"
            ),
            "resuming": lambda e: self._say(
                f"resume   run {escape(str(e['run']))} ({escape(str(e['state']))}) from "
                + (
                    f"step {e['step']}: {escape(str(e['checkpoint']))}"
                    if e["prepares"] is None
                    else f"what it has prepared: {escape(str(e['prepares']))}"
                )
            ),
            "first_weights": lambda e: self._say(
                f"weights  of run {escape(str(e['run']))} at step {e['step']}: {escape(str(e['path']))}"
            ),
            "phase": lambda e: self._say(f"stop     {escape(str(e.get('what') or e['phase']))}"),
            "run": self._run,
            "lock": lambda e: self._say(f"lock     {escape(lock_line(e))}"),
            "lease": lambda e: self._say(f"lease    {escape(lease_line(e))}"),
            "occupied": lambda e: self._say(f"gpu      {escape(occupied_line(e))}"),
            "read": lambda e: self._say(f"read     {escape(e['host'])}: {e['runs']} runs, {e['canaries']} canaries"),
            "rolled_back": self._rolled_back,
            "unlocked": lambda e: self._say(f"unlock   {escape(e['what'])}"),
            "error": self._error,
        }

    def __call__(self, event: Event) -> None:
        view = self._views.get(event["event"])
        if view is not None:
            # every text in it may be a host's: its terminal is not ours
            view(plain_value(event))

    def _say(self, text: str) -> None:
        self._console.print(text)

    def _plan(self, event: Event) -> None:
        self._say("plan (nothing is touched):")
        for step in event["steps"]:
            self._say(f"  {escape(step['stage']):12}{escape(step['what'])}")

    def _built(self, event: Event) -> None:
        dirty = f", {number(len(event['dirty']), 'file')} unlike the commit's" if event["dirty"] else ""
        patches = f", {number(len(event['patches']), 'patch', 'patches')}" if event["patches"] else ""
        commit = f" at {event['commit'][:10]}" if event["commit"] else ""
        self._say(
            f"build    release [bold]{event['release'][:12]}[/]: {event['files']} files, {sized(event['bytes'])}, "
            f"from {escape(event['source'])}{commit}{dirty}{patches}"
        )
        if event["left_out"]:
            named = ", ".join(event["left_out"][:FEW]) + (", ..." if len(event["left_out"]) > FEW else "")
            self._say(
                f"  [yellow]left out[/] {number(len(event['left_out']), 'file')} that git does not track: "
                f"{escape(named)}; to ship them, git add them or name them in trainer.include"
            )

    def _finding(self, event: Event) -> None:
        colour = "red" if event["severity"] == "error" else "yellow"
        self._say(
            f"  {escape(event['path'])}:{event['line']}: [{colour}]{event['severity']}[/] "
            f"{escape('[' + event['rule'] + ']')} {escape(event['why'])}"
        )
        if event.get("suppressed"):
            self._say(f"    allowed: {escape(event['suppressed'])}")
        else:
            self._say(f"    fix: {escape(event['fix'])}")

    def _staged(self, event: Event) -> None:
        sent = f"{sized(event['sent'])} sent, every file verified" if event["sent"] else "already there: no bytes sent"
        self._say(f"stage    {event['release'][:12]}: {sent}")

    def _diagnosis(self, event: Event) -> None:
        self._say(f"doctor   {MARKS[event['level']]} {escape(event['layer'])}: {escape(event['what'])}")
        if event["fix"] and event["level"] != "ok":
            self._say(f"           {escape(event['fix'])}")

    def _tuned(self, table: dict[str, Any]) -> None:
        shown = Table(*COLUMNS, box=None, pad_edge=False)
        for row in rows(table):
            shown.add_row(*map(escape, row))
        self._console.print(shown)
        self._say(f"tune     `auto` is {escape(str(table.get('fastest') or 'nothing: no strategy is right here'))}")

    def _verdict(self, event: Event) -> None:
        passed = 0
        for check in event["checks"]:
            if check["outcome"] == "pass":
                passed += 1
                continue
            if event["reused"] and check["outcome"] != "warn":
                # said when it was made; a warning is worth saying again
                continue
            worker = "" if check.get("worker") is None else f" worker {check['worker']}"
            summary = escape(gist(check.get("summary", "")))
            self._say(f"         {OUTCOMES[check['outcome']]} {escape(check['id'])}{worker}: {summary}")
        if event["reused"]:
            self._say(f"canary   {OUTCOMES[event['outcome']]}, reused: {escape(event['why'])}")
            return
        self._say(f"canary   {OUTCOMES[event['outcome']]}: {escape(gist(event['summary']))} ({passed} checks passed)")

    def _launched(self, event: Event) -> None:
        unit = f" as {escape(event['unit'])}" if event["unit"] else ""
        self._say(f"launch   run [bold]{event['run']}[/] on {escape(event['host'])}{unit}")
        if event["prepares"]:
            self._say(f"         prepares data in {escape(str(event['prepares']))}")
        if event["skipped_canary"]:
            self._say(f"         [bold red]without a canary[/]: {escape(event['skipped_canary'])}")

    def _log(self, event: Event) -> None:
        stream = sys.stdout if event["source"] == "run" else sys.stderr
        if stream is sys.stderr:
            self._logged.append(event["line"].rstrip())
        stream.write(event["line"] + "\n")
        stream.flush()

    def _progress(self, event: Event) -> None:
        if event["kind"] == "evaluation":
            when = f"step {event['step']}" if event["when"] == "step" else str(event["when"])
            self._say(
                f"eval     {escape(when)}: held-out loss {_figure(event['loss'])}, first-slot acceptance "
                f"{_figure(event['first_slot_acceptance'])}, tau {_figure(event['tau'])}"
            )

    def _probation(self, event: Event) -> None:
        run = escape(str(event["run"]))
        if not event["done"]:
            self._say(f"probe    waiting for {event['of']} steps of run {run}; Ctrl-C leaves it alone")
            return
        self._say(f"probe    {event['done']} of {event['of']}: step {event['step']}, loss {_figure(event['loss'])}")
        if event["done"] == event["of"]:
            self._say(f"         the run goes on: `dflash-ops tail-logs -f {run}`")

    def _ended(self, event: Event) -> None:
        self._say(f"run      {escape(str(event['run']))} ended [bold]{escape(str(event['state']))}[/]")
        self._say_why(event.get("exit"))

    def _say_why(self, ended: dict[str, Any] | None) -> None:
        """Only where its supervisor ended it or its trainer refused: elsewhere its log says it."""
        if because := why(ended):
            self._say(f"         [red]{escape(because)}[/]")

    def _collected(self, event: Event) -> None:
        brought = (
            f"{event['files']} files, {sized(event['bytes'])}, verified by sha256," if event["files"] else "nothing new"
        )
        self._say(f"collect  {brought} in {escape(event['folder'])}")
        for name in ("log", "metrics", "prepared", "report"):
            if event[name] is not None:
                self._say(f"  {name:11}{escape(event[name])}")
        finite = [path for path in event["checkpoints"] if path not in event["doubtful"]]
        for path in finite[-1:]:
            self._say(f"  checkpoint {escape(path)}")
        for path in event["doubtful"]:
            self._say(f"  [yellow]not[/] {escape(path)}: written after the last finite loss")
        quality = event["quality"]
        if quality:
            before, after = quality["before"], quality["after"]
            for key, name in (
                ("loss", "held-out loss (nats)"),
                ("first_slot_acceptance", "first-slot acceptance"),
                ("tau", "tau"),
            ):
                self._say(f"  {name:22} {_figure(before.get(key))} -> {_figure(after.get(key))}")
            self._say("  (tau counts tokens a verification; at this length of training it is no speed-up)")

    def _prune(self, event: Event) -> None:
        fate = {"goes": "[yellow]would go[/]" if event["dry_run"] else "[yellow]gone[/]", "stuck": "[red]stuck[/]"}
        # a run's name is typed again, a digest is not
        name = event["name"] if event["kind"] == "run" else event["name"][:12]
        self._say(
            f"prune    {fate.get(event['fate'], 'stays')} {event['kind']} {escape(name)} "
            f"({sized(event['bytes'])}): {escape(event['why'])}"
        )

    def _run(self, event: Event) -> None:
        as_of = event.get("as_of")
        state = event["state"] or f"canary {event.get('verdict')}"
        colour = {"RUNNING": "cyan", "SUCCEEDED": "green", "STOPPED": "yellow", "canary pass": "green"}.get(
            state, "red"
        )
        last = event.get("last") or {}
        step = f", step {last.get('step')}, loss {_figure(last.get('loss'))}" if last else ""
        host = f"{escape(event['host'])}  " if as_of is not None else ""
        age = f"  [dim]as of {utc(as_of)}[/]" if as_of is not None else ""
        self._say(
            f"{host}{escape(str(event['run']))}  [{colour}]{escape(str(state))}[/]  "
            f"{escape(', '.join(event['devices']))}  from {utc(event['started'])}{escape(step)}{age}"
        )
        if event["state"] == "RUNNING" and (told := bottleneck([last])):
            self._say(f"  {told}")
        self._say_why(event.get("exit"))
        if event["state"] == "STOPPED" and (event.get("exit") or {}).get("forced"):
            self._say("  killed: it did not end within its grace; nothing after its last checkpoint is kept")
        if event.get("hint"):
            self._say(f"  lost: {escape(str(event['hint']))}")
        low = event.get("disk_low")
        if isinstance(low, dict):
            self._say(f"  [yellow]disk[/] {escape(str(low.get('what')))}")
        untold = event.get("untold")
        if isinstance(untold, dict):
            what = f"nobody was told ({untold.get('event')}): {untold.get('what')}"
            self._say(f"  [yellow]notify[/] {escape(what)}")
        if event.get("managed"):
            self._say(f"  environment {escape(str(event['managed'])[:12])}")
        elif event.get("python"):
            self._say(f"  python {escape(str(event['python']))}")
        if event.get("prepares"):
            self._say(f"  prepares data in {escape(str(event['prepares']))}")
        if event.get("said"):
            self._say(f"  {escape(str(event['said'])[:LONGEST_SAID])}")
        if event.get("skipped_canary"):
            self._say(f"  [bold red]without a canary[/]: {escape(event['skipped_canary'])}")
        if event.get("parent"):
            self._say(f"  goes on with {escape(str(event['parent']))}")
        following = event.get("next") or {}
        if following.get("run"):
            self._say(f"  went on as {escape(str(following['run']))}")
        elif following.get("due"):
            self._say(f"  its host starts it again at {utc(following['due'])}")
        elif following:
            self._say(f"  not started again: {escape(str(following['why']))}")

    def _rolled_back(self, event: Event) -> None:
        for one in event["passed_over"]:
            self._say(f"rollback passed over {one['release'][:12]}: {escape(one['why'])}")
        left = f" (it was {event['previous'][:12]}, now `previous`)" if event["previous"] else ""
        self._say(
            f"rollback [bold]{event['current'][:12]}[/] is current on {escape(event['host'])}{left}: "
            f"its canary passed on {', '.join(event['devices'])}; no run was touched"
        )

    def _error(self, event: Event) -> None:
        # one problem a line
        what = str(event["what"]).replace("\n", "\n         ")
        self._say(f"[bold red]error[/]    {escape(what)}")
        if event["where"]:
            self._say(f"  where  {escape(event['where'])}")
        lines = [line for line in _evidence_lines(event["evidence"]) if line.rstrip() not in self._logged]
        # names that are offered are not listed twice
        if not (isinstance(event["evidence"], list) and all(line in event["fix"] for line in lines)):
            for line in lines:
                self._say(f"         {escape(line)}".rstrip())
        if event["fix"]:
            self._say(f"  next   {escape(event['fix'])}")


def _figure(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"


def _evidence_lines(evidence: Any) -> list[str]:
    if isinstance(evidence, str):
        return evidence.rstrip().splitlines()[-40:]
    if isinstance(evidence, list):
        # configuration problems stand in the text already
        return [
            f"{one['path']}:{one.get('line')}: {one.get('message')}" if isinstance(one, dict) else str(one)
            for one in evidence
            if not isinstance(one, dict) or "path" in one
        ]
    if isinstance(evidence, dict) and isinstance(evidence.get("log_tail"), list):
        return [str(line) for line in evidence["log_tail"]]
    return []
