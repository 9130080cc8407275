"""`dflash-ops`, and `python -m dflash_ops`."""

import gc

from dflash_ops.interrupts import before_the_command

YOUNG_OBJECTS = 20_000


def main() -> None:
    """Console script. Exits with the documented codes only."""
    before_the_command()
    # imports make a hundred thousand objects that stay: nothing is gained by looking through them again and again
    gc.set_threshold(YOUNG_OBJECTS)
    from dflash_ops.cli import main as command_line

    try:
        command_line()
    finally:
        # all that is left goes with the process: a last look through it takes 0.2 s
        gc.freeze()


if __name__ == "__main__":
    main()
