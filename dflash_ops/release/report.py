"""How a finding looks to a person and to a machine."""

from __future__ import annotations

from dflash_ops.release.finding import Finding


def finding_text(finding: Finding) -> str:
    """`path:line: severity[rule]: why` and, on a line of its own, the fix or the reason it is allowed."""
    why = " ".join(finding.why.split())
    if finding.suppressed is not None:
        return f"{finding.path}:{finding.line}: allowed[{finding.rule}]: {why}\n  reason: {finding.suppressed}"
    return f"{finding.path}:{finding.line}: {finding.severity.value}[{finding.rule}]: {why}\n  fix: {finding.fix}"


def finding_dict(finding: Finding) -> dict[str, str | int | bool | None]:
    """The finding as the fields of an NDJSON event."""
    return {
        "rule": finding.rule,
        "severity": finding.severity.value,
        "path": finding.path,
        "line": finding.line,
        "why": finding.why,
        "fix": finding.fix,
        "suppressed": finding.suppressed,
        "blocks": finding.blocks,
    }
