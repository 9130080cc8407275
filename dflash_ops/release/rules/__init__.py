"""The compile-safety rules. A new rule is one file and one line in this table."""

from __future__ import annotations

from dflash_ops.release.rules import compile_mode_and_options, private_tls_stash, trees_config_outside_worker
from dflash_ops.release.rules.base import Hit, Rule

RULES: tuple[Rule, ...] = (
    compile_mode_and_options.RULE,
    private_tls_stash.RULE,
    trees_config_outside_worker.RULE,
)

__all__ = ["RULES", "Hit", "Rule"]
