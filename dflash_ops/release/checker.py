"""Static checks over every .py file of a tree: syntax first, then the compile-safety rules."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from dflash_ops.release import syntax_probe
from dflash_ops.release.errors import ReleaseError
from dflash_ops.release.finding import Finding, Severity
from dflash_ops.release.program import Program
from dflash_ops.release.resolve import Module
from dflash_ops.release.rules import RULES, Hit, Rule
from dflash_ops.release.suppress import Allowances
from dflash_ops.release.threads import Threads

_PROBE_TIMEOUT_S = 120
_TOO_DEEP = "an expression in it is nested too deep"


def check(tree: Path, *, python: str | None) -> list[Finding]:
    """Findings of all files below `tree`, by path and line, the suppressed ones too.

    Syntax is the one of the interpreter `python` (a path or a name on PATH; None: this interpreter). Raises
    ReleaseError when the tree or the interpreter is missing or gives no answer.
    """
    if not tree.is_dir():
        raise ReleaseError("there is no such folder", str(tree), "name the folder of a built release")
    files = [path for path in sorted(tree.rglob("*.py")) if path.is_file()]
    errors = _local_errors(files) if python is None else _foreign_errors(files, python)
    findings: list[Finding] = []
    sources: dict[str, bytes] = {}
    for file in files:
        path = file.relative_to(tree).as_posix()
        if file in errors:
            line, message = errors[file]
            findings.append(_syntax(path, line, message, python))
        else:
            sources[path] = file.read_bytes()
    findings += _rules(sources, compiles_here=python is None)
    return sorted(findings, key=lambda finding: (finding.path, finding.line, finding.rule))


def _syntax(path: str, line: int, message: str, python: str | None) -> Finding:
    who = "this Python" if python is None else python
    return Finding(
        "syntax",
        Severity.ERROR,
        path,
        line,
        f"does not compile under {who}: {message}",
        "correct the line, in the source tree or in the patch that brings it",
    )


def _rules(sources: Mapping[str, bytes], *, compiles_here: bool) -> list[Finding]:
    findings: list[Finding] = []
    modules: dict[str, Module] = {}
    allowances: dict[str, Allowances] = {}
    for path, data in sources.items():
        error = None if compiles_here else syntax_probe.compile_error(data, path)
        if error is not None:
            findings.append(_not_checked(path, int(error[0]), f"this Python does not compile it ({error[1]})"))
            continue
        try:
            modules[path] = Module.parse(data)
        except RecursionError:
            findings.append(_not_checked(path, 0, _TOO_DEEP))
            continue
        allowances[path] = Allowances.read(data)
    threads = Threads(Program(modules))
    for path, module in modules.items():
        try:
            hits = [(rule, hit) for rule in RULES for hit in rule.find(module, threads)]
        except RecursionError:
            findings.append(_not_checked(path, 0, _TOO_DEEP))
            continue
        findings += [_finding(rule, hit, path, allowances[path]) for rule, hit in hits]
    return findings


def _not_checked(path: str, line: int, reason: str) -> Finding:
    """The target's Python takes the file, so the build may go on; but silence would look like a pass."""
    return Finding(
        "not-checked",
        Severity.WARNING,
        path,
        line,
        f"no rule looked at this file: {reason}",
        "run the check with the target's Python version, or split the expression",
    )


def _finding(rule: Rule, hit: Hit, path: str, allowances: Allowances) -> Finding:
    reason = allowances.reason(rule.id, hit.first_line, hit.last_line)
    fix = hit.fix
    if reason == "":
        fix += f"; the allow comment does not count without a reason: # dflash: allow[{rule.id}] REASON"
    return Finding(rule.id, hit.severity, path, hit.first_line, hit.why, fix, reason or None)


def _local_errors(files: Sequence[Path]) -> dict[Path, tuple[int, str]]:
    found = ((file, syntax_probe.compile_error(file.read_bytes(), str(file))) for file in files)
    return {file: (int(error[0]), str(error[1])) for file, error in found if error is not None}


def _foreign_errors(files: Sequence[Path], python: str) -> dict[Path, tuple[int, str]]:
    fix = "name a Python 3.9 or newer"
    try:
        done = subprocess.run(
            [python, "-I", "-B", syntax_probe.__file__],
            input=json.dumps([str(file) for file in files]).encode(),
            capture_output=True,
            check=False,
            timeout=_PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReleaseError(f"this interpreter cannot check syntax: {error}", python, fix) from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        what = f"this interpreter cannot check syntax: exit code {done.returncode}"
        raise ReleaseError(": ".join([what, *said[-1:]]), python, fix)
    answer = json.loads(done.stdout)
    return {Path(path): (int(line), str(message)) for path, (line, message) in answer.items()}
