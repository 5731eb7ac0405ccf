"""The rows of a bench of one part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchRow:
    """One figure. `ok` is None where there is no bar to hold it against."""

    name: str
    value: float
    unit: str
    bar: str = ""
    ok: bool | None = None
    detail: str = ""
