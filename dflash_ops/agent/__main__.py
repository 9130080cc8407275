"""`serve NONCE WORKDIR [--beat S]`, `supervise RUN_DIR [--detach]` and `build WORKDIR DIGEST LOCK_FD`."""

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
    build = verbs.add_parser("build")
    build.add_argument("workdir")
    build.add_argument("digest")
    build.add_argument("lock_fd", type=int)
    options = parser.parse_args()
    if options.verb == "build":
        from .builder import build as run_builder

        return run_builder(options.workdir, options.digest, options.lock_fd)
    if options.verb == "supervise":
        from .supervisor import supervise as run_supervisor

        return run_supervisor(options.run_dir, options.detach)
    from .server import serve as run_server

    return run_server(options.nonce, options.workdir, options.beat, os.path.abspath(sys.argv[0]))


if __name__ == "__main__":
    sys.exit(main())
