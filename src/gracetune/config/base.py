"""The field types and the base class that every section of a `RunConfig` is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict, StrictBool, StringConstraints


class Section(BaseModel):
    """Frozen, complete when built, and refusing every key it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


Flag = StrictBool
"""true or false; `"yes"` and 1 are refused rather than guessed at."""

WholeNumber = Annotated[int, Strict(), Field(ge=0)]
PositiveInt = Annotated[int, Strict(), Field(ge=1)]
Number = Annotated[float, Strict()]
PositiveFloat = Annotated[float, Strict(), Field(gt=0)]
NonNegativeFloat = Annotated[float, Strict(), Field(ge=0)]
Fraction = Annotated[float, Strict(), Field(ge=0, le=1)]
OpenFraction = Annotated[float, Strict(), Field(gt=0, lt=1)]
Text = Annotated[str, Strict()]
Name = Annotated[str, Strict(), StringConstraints(min_length=1, pattern=r"\S")]
Options = dict[str, Any]
"""Options handed to a library as they are; that library's own names, checked by the part that uses them."""
