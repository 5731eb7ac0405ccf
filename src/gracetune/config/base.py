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
    """Frozen, complete when built, and refusing every key it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


Flag = StrictBool
"""true or false; `"yes"` and 1 are refused rather than guessed at."""

WholeNumber = Annotated[int, Strict(), Field(ge=0, le=10**10)]
PositiveInt = Annotated[int, Strict(), Field(ge=1, le=10**10)]
"""Nobody counts further; people write 9999999999 for "never"."""
BatchSize = Annotated[int, Strict(), Field(ge=1, le=16_384)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
Number = Annotated[float, Strict(), Field(ge=-1e12, le=1e12)]
PositiveFloat = Annotated[float, Strict(), Field(gt=0, le=1e12)]
NonNegativeFloat = Annotated[float, Strict(), Field(ge=0, le=1e12)]
"""What is multiplied with a few of its kind still fits a float."""
Fraction = Annotated[float, Strict(), Field(ge=0, le=1)]
OpenFraction = Annotated[float, Strict(), Field(gt=0, lt=1)]
LONGEST_SIDE = 8192
"""In pixels, of a picture that is trained on or drawn: far beyond what any model was made for."""
FrameRate = Annotated[float, Strict(), Field(ge=0.001, le=1000)]
Text = Annotated[str, Strict()]
Name = Annotated[str, Strict(), StringConstraints(min_length=1, pattern=r"\S")]
Secret = Annotated[Name | None, Field(repr=False, json_schema_extra={"writeOnly": True})]
"""A credential, or None. Its name must be one that `gracetune.redaction.is_secret_name` recognises."""
LONGEST_FILE_NAME = 200
"""In bytes: file systems take 255, and steps and endings are put behind it."""


def file_name(text: str) -> str:
    """The nearest name a file can have: other programs' files may name a run as no file can be named."""
    safe = re.sub(r"[/\\\0]", "-", text.strip())
    safe = safe.encode()[:LONGEST_FILE_NAME].decode(errors="ignore").rstrip()
    return "run" if safe in (".", "..") else safe


def _one_file_name(text: str) -> str:
    if text in (".", "..") or len(text.encode()) > LONGEST_FILE_NAME:
        raise ValueError("not a file name")
    return text


FileName = Annotated[
    str,
    Strict(),
    StringConstraints(min_length=1, pattern=r"^[^/\\\x00]*[^/\\\x00\s][^/\\\x00]*$"),
    AfterValidator(_one_file_name),
    Field(json_schema_extra={"format": "file-name"}),
]
Options = dict[str, Any]
"""Options handed to a library as they are; that library's own names, checked by the part that uses them."""
