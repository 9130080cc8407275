"""Work that goes on in a thread while something else is done."""

from __future__ import annotations

import threading
from typing import Callable, List, TypeVar

Result = TypeVar("Result")


def beside(work: Callable[[], Result]) -> Callable[[], Result]:
    """Begins `work` now. The function that it returns waits for it, and returns or raises what it did.

    Work that nobody waits for any more goes on to its end, or to that of the process.
    """
    done: List[Result] = []
    failed: List[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # whatever it is, it is raised where it is waited for
            failed.append(error)

    thread = threading.Thread(target=run, name="beside", daemon=True)
    thread.start()

    def result() -> Result:
        thread.join()
        if failed:
            raise failed[0]
        return done[0]

    return result
