"""The canary: proves on this machine that every drafter thread computes the right numbers, before the run starts.

First a gate: the run's own threads, replicas, strategy and shapes on random data, each against an eager reference.
Then a rehearsal: a few steps of the run's own entry point with the real target and the longest rows.
"""

from trainer.canary.entry import run_canary

__all__ = ["run_canary"]
