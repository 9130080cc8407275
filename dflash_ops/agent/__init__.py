"""The part of dflash-ops that runs on the host: standard library only, Python 3.9 or newer, nothing installed.

`docs/agent-protocol.md` is its specification. It travels as one zip application (see `bundle.py`), so every
import in this package is relative. What is seldom needed is imported where it is: somebody waits for every start.
"""
