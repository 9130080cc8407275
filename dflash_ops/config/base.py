"""What all configuration models share, and the checked kinds of text in them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

# no other package has a say here, and to look for one pydantic reads what every installed package says of itself
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


class Model(BaseModel):
    """Frozen and strict: unknown keys are refused, `"5"` is no number, numbers are finite."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Matches:
    """Metadata for a `str`: it must match `pattern` as a whole; `what` says so to a person."""

    pattern: str
    what: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        compiled = re.compile(self.pattern)

        def check(value: str) -> str:
            if not compiled.fullmatch(value):
                raise ValueError(f"must be {self.what}")
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(core), "pattern": f"^(?:{self.pattern})$"}


NAME = Matches(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "letters, digits, '.', '_' or '-' (first a letter or digit)")
PROGRAM = Matches(r"/[^\x00-\x1f\x7f]*|[A-Za-z0-9_+][A-Za-z0-9_+.-]*", "an absolute path, or a name found on PATH")
"""Relative paths are refused: nobody could say relative to what."""
SECTIONS = "sections"
"""The type of a model's error that its loader tells better, with a line."""
TEXT = Matches(r"[^\x00-\x1f\x7f]+", "text, not empty and without control characters")
