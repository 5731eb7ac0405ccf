"""An adapter as plain data. Training, file formats, merging and verification exchange adapters in this form.

A layer is named by its module's path in the diffusers model (`blocks.0.attn1.to_q`). The record of its algorithm
(`algorithms/`) defines the names of its tensors.
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
    """None if no tensor is decomposed; the scale is then 1."""

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
    """The header of the file the adapter was read from. `adapters.metadata` builds the header of a written file."""
