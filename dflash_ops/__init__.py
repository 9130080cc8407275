"""dflash-ops: build, ship, prove and run multi-threaded DFlash drafter training."""

__version__ = "0.1.0"
