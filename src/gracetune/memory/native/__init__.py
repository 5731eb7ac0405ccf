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
    ManagedSpan,
    Migrations,
    RangeState,
    SlotPolicy,
    SlotSymbols,
    Unavailable,
)

__all__ = [
    "HOST",
    "AccountStats",
    "Advice",
    "Failure",
    "Features",
    "ManagedSpan",
    "Migrations",
    "RangeState",
    "SlotPolicy",
    "SlotSymbols",
    "Unavailable",
    "Uvm",
    "load",
]
