"""Writes the JSON Schemas next to this module."""

from dflash_ops.config.schema import texts

for path, text in texts().items():
    partial = path.with_suffix(".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
