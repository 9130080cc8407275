"""The compile-safety rules. A new rule is one file and one line in this table."""

from __future__ import annotations

from dflash_ops.release.rules import (
    compile_mode_and_options,
    compile_outside_gate,
    compiled_optimizer_step,
    config_outside_worker,
    default_generator_draw,
    device_synchronize_in_worker,
    global_capture_mode,
    global_reset_in_worker,
    global_seed_in_worker,
    mark_step_in_thread,
    output_kept_across_steps,
    private_tls_stash,
    shared_code_object,
    silent_eager,
    size_asserts_off,
    trees_config_outside_worker,
    weights_moved_after_capture,
    worker_without_device,
)
from dflash_ops.release.rules.base import Hit, Rule

RULES: tuple[Rule, ...] = (
    compile_mode_and_options.RULE,
    private_tls_stash.RULE,
    trees_config_outside_worker.RULE,
    config_outside_worker.RULE,
    compile_outside_gate.RULE,
    global_capture_mode.RULE,
    worker_without_device.RULE,
    shared_code_object.RULE,
    default_generator_draw.RULE,
    global_seed_in_worker.RULE,
    device_synchronize_in_worker.RULE,
    mark_step_in_thread.RULE,
    global_reset_in_worker.RULE,
    silent_eager.RULE,
    size_asserts_off.RULE,
    output_kept_across_steps.RULE,
    compiled_optimizer_step.RULE,
    weights_moved_after_capture.RULE,
)

__all__ = ["RULES", "Hit", "Rule"]
