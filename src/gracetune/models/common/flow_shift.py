"""The flow shift of a model, from its scheduler's configuration.

A noise level u becomes s u / (1 + (s - 1) u). s > 1 moves levels towards noise. s is one number, or grows with the
number of tokens of an image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gracetune.config.run_config import ShiftLine

MEGAPIXEL_TOKENS = 4096
"""Tokens of a 1024 x 1024 image: 8 pixels per latent, 2 latents per token side."""


@dataclass(frozen=True)
class ResolutionShift:
    """A straight line through two points, from an image's tokens to its shift or (`exponential`) to the shift's log."""

    base_tokens: int
    base: float
    max_tokens: int
    max: float
    exponential: bool = True

    def at(self, tokens: int) -> float:
        slope = (self.max - self.base) / (self.max_tokens - self.base_tokens)
        value = self.base + slope * (tokens - self.base_tokens)
        return math.exp(value) if self.exponential else value


@dataclass(frozen=True)
class EmpiricalShift:
    """FLUX.2's rule: the log of the shift grows with an image's tokens, and up to `_MANY_TOKENS` also with fewer steps.

    The numbers are those of diffusers' pipelines, fitted at 10 and at 200 steps. Training takes those of a sample of
    `steps`, the pipelines' default.
    """

    steps: int = 50

    def at(self, tokens: int) -> float:
        at_200 = 0.00016927 * tokens + 0.45666666
        if tokens > _MANY_TOKENS:
            return math.exp(at_200)
        at_10 = 8.73809524e-05 * tokens + 1.89833333
        return math.exp(at_200 + (at_200 - at_10) / 190 * (self.steps - 200))


_MANY_TOKENS = 4300


def shift_along(line: ShiftLine) -> ResolutionShift:
    """The rule with the end points a config gives."""
    return ResolutionShift(line.base_image_seq_len, line.base_shift, line.max_image_seq_len, line.max_shift)


def read_shift(scheduler: Mapping[str, Any]) -> tuple[float, ResolutionShift | None]:
    """The shift for an image of one megapixel, and the rule behind it if the shift depends on the size."""
    if not scheduler.get("use_dynamic_shifting", False):
        return float(scheduler.get("shift", 1.0)), None
    # The defaults are those of diffusers' pipelines.
    rule = ResolutionShift(
        base_tokens=scheduler.get("base_image_seq_len", 256),
        base=scheduler.get("base_shift", 0.5),
        max_tokens=scheduler.get("max_image_seq_len", 4096),
        max=scheduler.get("max_shift", 1.15),
        exponential=scheduler.get("time_shift_type", "exponential") == "exponential",
    )
    return rule.at(MEGAPIXEL_TOKENS), rule
