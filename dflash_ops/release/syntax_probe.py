"""Compiles Python files and says what is wrong with them.

Imported here, and run as a script by the interpreter that is asked for: standard library only, and it must
run on any Python from 3.7. Reads paths (a JSON list) from standard input, writes a JSON object to standard
output: path to [line, message] for each file that does not compile.
"""

from __future__ import annotations

import json
import sys
import warnings


def compile_error(data: bytes, path: str) -> list[int | str] | None:
    """[line, message] where `data` is no Python of this interpreter, else None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return [error.lineno or 0, str(error.msg)]
    except (ValueError, RecursionError, MemoryError) as error:  # a NUL byte; nested too deep
        return [0, str(error) or type(error).__name__]
    return None


def main() -> None:
    errors = {}
    for path in json.load(sys.stdin):
        with open(path, "rb") as stream:
            error = compile_error(stream.read(), path)
        if error is not None:
            errors[path] = error
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()
