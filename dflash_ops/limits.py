"""The largest numbers that anybody may name: beyond them is a slip of the finger, told at once and here."""

MOST = 10**9
"""Of things that are counted, and of plain numbers."""
LONGEST_S = 10 * 365 * 86400
"""Seconds: ten years."""
LONGEST_H = LONGEST_S // 3600
LARGEST_BYTES = 2**50
MOST_RESTARTS = 100
