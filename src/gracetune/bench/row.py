"""Rows of the component benches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchRow:
    """One measured figure. `bar` is its target; `ok` is None without one."""

    name: str
    value: float
    unit: str
    bar: str = ""
    ok: bool | None = None
    detail: str = ""
