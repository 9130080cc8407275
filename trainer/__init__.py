"""The DFlash drafter trainer: what dflash-ops builds, ships and runs. It never imports dflash_ops."""
