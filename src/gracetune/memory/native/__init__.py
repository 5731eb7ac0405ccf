"""The native shim: CUDA managed memory through the driver API, for allocators that must not call Python.

`load()` returns a `Uvm`, or an `Unavailable` with the reason and a remedy.
"""

from __future__ import annotations

from gracetune.memory.native.binding import Uvm, load
from gracetune.memory.native.records import (
    HOST,
    AccountStats,
    Advice,
    Failure,
    Features,
    Migrations,
    RangeState,
    SlotPolicy,
    SlotSymbols,
    Span,
    Unavailable,
)

__all__ = [
    "HOST",
    "AccountStats",
    "Advice",
    "Failure",
    "Features",
    "Migrations",
    "RangeState",
    "SlotPolicy",
    "SlotSymbols",
    "Span",
    "Unavailable",
    "Uvm",
    "load",
]
