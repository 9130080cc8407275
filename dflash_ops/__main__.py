"""`python -m dflash_ops` is `dflash-ops`."""

from dflash_ops.cli import main

if __name__ == "__main__":
    main()
