"""The field types and the base class that every section of a `RunConfig` is made of."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    StrictBool,
    StringConstraints,
)


class Section(BaseModel):
    """Base of all sections: frozen, complete once constructed, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


Flag = StrictBool
"""true or false. `"yes"` and 1 are errors, because converting them would be a guess."""

WholeNumber = Annotated[int, Strict(), Field(ge=0, le=10**10)]
PositiveInt = Annotated[int, Strict(), Field(ge=1, le=10**10)]
"""The upper bound of both admits 9999999999, which people write for "never"."""
BatchSize = Annotated[int, Strict(), Field(ge=1, le=16_384)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
Number = Annotated[float, Strict(), Field(ge=-1e12, le=1e12)]
PositiveFloat = Annotated[float, Strict(), Field(gt=0, le=1e12)]
NonNegativeFloat = Annotated[float, Strict(), Field(ge=0, le=1e12)]
"""The bounds of all three keep products of a few such numbers within the range of a float."""
Fraction = Annotated[float, Strict(), Field(ge=0, le=1)]
OpenFraction = Annotated[float, Strict(), Field(gt=0, lt=1)]
LONGEST_SIDE = 8192
"""Longest side, in pixels, of a training image or a generated one. No published model was trained at such a size."""
FrameRate = Annotated[float, Strict(), Field(ge=0.001, le=1000)]
Text = Annotated[str, Strict()]
Name = Annotated[str, Strict(), StringConstraints(min_length=1, pattern=r"\S")]
Secret = Annotated[Name | None, Field(repr=False, json_schema_extra={"writeOnly": True})]
"""A credential, or None. `gracetune.redaction.is_secret_name` must recognize the name of the field."""
LONGEST_FILE_NAME = 200
"""In bytes. File systems allow 255; step numbers and extensions are appended to the name."""


def file_name(text: str) -> str:
    """Convert a run's name to a valid file name. Other programs allow names that no file can have."""
    safe = re.sub(r"[/\\\0]", "-", text.strip())
    safe = safe.encode()[:LONGEST_FILE_NAME].decode(errors="ignore").rstrip()
    return "run" if safe in (".", "..") else safe


def _check_file_name(text: str) -> str:
    if text in (".", "..") or len(text.encode()) > LONGEST_FILE_NAME:
        raise ValueError("not a file name")
    return text


FileName = Annotated[
    str,
    Strict(),
    StringConstraints(min_length=1, pattern=r"^[^/\\\x00]*[^/\\\x00\s][^/\\\x00]*$"),
    AfterValidator(_check_file_name),
    Field(json_schema_extra={"format": "file-name"}),
]
Options = dict[str, Any]
"""Options passed to a library unchanged, under that library's names. The code that passes them checks them."""
