"""Automagic's per-element learning rates, stored as integers.

A rate is a whole number of units, and unit = bump / s with the largest integer s for which max_lr / unit <= 65535. If
even s = 1 does not fit into 16 bits, 32 bits are used. A bump is therefore exactly s units everywhere in the range, and
rounding never loses one. The two ends of the range stand for `min_lr` and `max_lr` exactly, even if these are not
multiples of the unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

_UNITS_16 = 65535
_UNITS_32 = 1 << 30
BIAS_16 = 32768
"""Subtracted to store 0..65535 as int16, because torch has few uint16 operations."""
_ALMOST = 1e-6
"""Tolerance in units: 65000.00000001 units count as 65000."""


@runtime_checkable
class KeepsRates(Protocol):
    """An optimizer with one learning rate per element."""

    def learning_rates(self) -> dict[str, Tensor]:
        """The mean rate of each param group."""
        ...

    def load_rates(self, rates: Mapping[str, Tensor], signs: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class RateLimits:
    """How far one update moves a rate, and the range it stays in."""

    lr_bump: float = 1e-6
    min_lr: float = 1e-7
    max_lr: float = 1e-3

    def __post_init__(self) -> None:
        values = (self.lr_bump, self.min_lr, self.max_lr)
        if not all(math.isfinite(value) and value > 0 for value in values) or self.min_lr > self.max_lr:
            raise ValueError(
                f"lr_bump {self.lr_bump:g}, min_lr {self.min_lr:g}, max_lr {self.max_lr:g}: "
                "all above 0, and min_lr at most max_lr"
            )


@dataclass(frozen=True)
class RateGrid:
    """The integer representation of rates within `limits`.

    `lowest` and `highest` are the ends of the range in units.
    """

    limits: RateLimits
    unit: float
    bump: int
    """Units per bump, s."""
    lowest: int
    highest: int
    dtype: torch.dtype

    @classmethod
    def of(cls, limits: RateLimits) -> RateGrid:
        span = limits.max_lr / limits.lr_bump
        dtype, room = torch.int16, _UNITS_16
        if _most_units(span, room) < 1:
            dtype, room = torch.int32, _UNITS_32
        bump = _most_units(span, room)
        if bump < 1:
            raise ValueError(f"max_lr {limits.max_lr:g} is more than a billion times lr_bump {limits.lr_bump:g}")
        unit = limits.lr_bump / bump
        highest = math.ceil(limits.max_lr / unit - _ALMOST)
        lowest = min(highest, math.floor(limits.min_lr / unit + _ALMOST))
        return cls(limits, unit, bump, lowest, highest, dtype)

    @property
    def bias(self) -> int:
        """Subtracted from the units for storage."""
        return BIAS_16 if self.dtype == torch.int16 else 0

    def stored(self, lr: float) -> int:
        """The stored integer of one rate."""
        return min(max(round(lr / self.unit), self.lowest), self.highest) - self.bias

    def store(self, rates: Tensor) -> Tensor:
        """Convert learning rates to stored integers, rounded to the nearest unit."""
        units = (rates.double() / self.unit).round().clamp(self.lowest, self.highest)
        return (units - self.bias).to(self.dtype)

    def moved(self, stored: Tensor, agrees: Tensor, fresh: Tensor) -> Tensor:
        """Units (int32) after a bump: up where the signs agree, down where they differ, unchanged where `fresh`."""
        units = stored.to(torch.int32) + self.bias
        step = agrees.to(torch.int32).mul_(2 * self.bump).sub_(self.bump).masked_fill_(fresh, 0)
        return units.add_(step).clamp_(self.lowest, self.highest)

    def rates(self, units: Tensor) -> Tensor:
        """Learning rates in float32."""
        rates = units.to(torch.float32) * self.unit
        rates.masked_fill_(units <= self.lowest, self.limits.min_lr)
        return rates.masked_fill_(units >= self.highest, self.limits.max_lr)

    def read(self, stored: Tensor) -> Tensor:
        """Learning rates of stored integers, in float32."""
        return self.rates(stored.to(torch.int32) + self.bias)


def _most_units(span: float, room: int) -> int:
    """The largest s with span * s <= room, at most `_UNITS_32`, so that 32-bit sums cannot overflow."""
    most = min(_UNITS_32, math.floor(room / span))
    # 1e-12 forgives floating-point error in the product.
    while most > 0 and span * most > room * (1 + 1e-12):
        most -= 1
    return most
