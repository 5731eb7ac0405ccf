"""Automagic's learning rates: one per element, as whole multiples of a unit that divides the bump exactly.

unit = bump / s, s the largest whole number with max_lr / unit <= 65535; where even s = 1 does not fit, 32 bits are
used. So a bump is always s units, at the top of the range as at the bottom, and none is lost to rounding. The two
ends of the range stand for `min_lr` and `max_lr` themselves, also where they are no multiple of the unit.
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
BIAS_16 = 32768  # torch computes with int16 everywhere, with uint16 hardly anywhere
_ALMOST = 1e-6
"""Of a unit: 65000.00000001 units are 65000."""


@runtime_checkable
class KeepsRates(Protocol):
    """An optimizer with learning rates of its own, one per element."""

    def learning_rates(self) -> dict[str, Tensor]:
        """The mean rate of each param group."""
        ...

    def load_rates(self, rates: Mapping[str, Tensor], signs: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class RateLimits:
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
    limits: RateLimits
    unit: float
    bump: int
    """s: the units of one bump."""
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
        """What is taken off the units where they are stored."""
        return BIAS_16 if self.dtype == torch.int16 else 0

    def stored(self, lr: float) -> int:
        return min(max(round(lr / self.unit), self.lowest), self.highest) - self.bias

    def store(self, rates: Tensor) -> Tensor:
        """From learning rates; rounded to the nearest unit."""
        units = (rates.double() / self.unit).round().clamp(self.lowest, self.highest)
        return (units - self.bias).to(self.dtype)

    def moved(self, stored: Tensor, agrees: Tensor, fresh: Tensor) -> Tensor:
        """Units (int32) after a bump: up where the signs agree, down where not, neither where there was none yet."""
        units = stored.to(torch.int32) + self.bias
        step = agrees.to(torch.int32).mul_(2 * self.bump).sub_(self.bump).masked_fill_(fresh, 0)
        return units.add_(step).clamp_(self.lowest, self.highest)

    def rates(self, units: Tensor) -> Tensor:
        """Learning rates in float32."""
        rates = units.to(torch.float32) * self.unit
        rates.masked_fill_(units <= self.lowest, self.limits.min_lr)
        return rates.masked_fill_(units >= self.highest, self.limits.max_lr)

    def read(self, stored: Tensor) -> Tensor:
        return self.rates(stored.to(torch.int32) + self.bias)


def _most_units(span: float, room: int) -> int:
    """The largest s with span x s <= room; not more than `_UNITS_32`, so that 32-bit sums cannot overflow."""
    most = min(_UNITS_32, math.floor(room / span))
    while most > 0 and span * most > room * (1 + 1e-12):
        most -= 1
    return most
