"""An adapter as plain data: the one form between training, file formats, merging and verification.

A layer is named by its module's path in diffusers' model (`blocks.0.attn1.to_q`). What its tensors are called is in the
record of its algorithm (`algorithms/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

ExpertStage = Literal["", "high_noise", "low_noise"]


@dataclass(frozen=True, eq=False)
class Layer:
    algorithm: str
    """The name of its record (`algorithms.registry`)."""
    tensors: Mapping[str, Tensor]
    alpha: float
    rank: int | None
    """None where nothing is decomposed."""

    @property
    def scale(self) -> float:
        return 1.0 if self.rank is None else self.alpha / self.rank


@dataclass(frozen=True, eq=False)
class AdapterState:
    """All layers of one adapter of one denoiser."""

    family: str
    expert: ExpertStage
    layers: Mapping[str, Layer]
    """By module path, in the model's own order."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Of the file it came from; what we write is made by `adapters.metadata`."""
