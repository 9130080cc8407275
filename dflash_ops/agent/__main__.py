"""`serve NONCE WORKDIR [--beat S]` and `supervise RUN_DIR [--detach]`."""

from __future__ import annotations

import argparse
import os
import sys

DEFAULT_BEAT_S = 5.0


def main() -> int:
    os.umask(0o077)
    parser = argparse.ArgumentParser(prog="dflash-ops agent")
    verbs = parser.add_subparsers(dest="verb", required=True)
    serve = verbs.add_parser("serve")
    serve.add_argument("nonce")
    serve.add_argument("workdir")
    serve.add_argument("--beat", type=float, default=DEFAULT_BEAT_S)
    supervise = verbs.add_parser("supervise")
    supervise.add_argument("run_dir")
    supervise.add_argument("--detach", action="store_true")
    options = parser.parse_args()
    if options.verb == "supervise":
        from .supervisor import supervise as run_supervisor

        return run_supervisor(options.run_dir, options.detach)
    from .server import serve as run_server

    return run_server(options.nonce, options.workdir, options.beat, os.path.abspath(sys.argv[0]))


if __name__ == "__main__":
    sys.exit(main())
