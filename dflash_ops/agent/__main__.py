"""`serve NONCE WORKDIR [--beat S]`, `supervise RUN_DIR [--detach]` and `build WORKDIR DIGEST LOCK_FD`.

Called by this package alone, so there is nothing to explain to anybody.
"""

from __future__ import annotations

import os
import sys

DEFAULT_BEAT_S = 5.0


def main() -> int:
    os.umask(0o077)
    verb, *words = sys.argv[1:]
    if verb == "build":
        from .builder import build

        workdir, digest, lock_fd = words
        return build(workdir, digest, int(lock_fd))
    if verb == "supervise":
        from .supervisor import supervise

        return supervise(words[0], words[1:] == ["--detach"])
    from .server import serve

    beat_s = float(words[3]) if words[2:3] == ["--beat"] else DEFAULT_BEAT_S
    return serve(words[0], words[1], beat_s, os.path.abspath(sys.argv[0]))


if __name__ == "__main__":
    sys.exit(main())
