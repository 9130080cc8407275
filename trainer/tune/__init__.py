"""Tuning: every strategy proven and timed on these GPUs, and what the strategy `auto` means by it."""
