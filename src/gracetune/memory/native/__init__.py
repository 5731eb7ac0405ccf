"""The native shim: CUDA managed memory through the driver alone, for allocators that must never touch Python.

`load()` gives a `Uvm`, or an `Unavailable` that says why not and what to do about it.
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
