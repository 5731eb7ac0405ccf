"""Z-Image's flow: the model time counts from pure noise (0) to the data (1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gracetune.diffusion.schedule import Flow

_STEPS = 1000


@dataclass(frozen=True)
class FlowFromNoise(Flow):
    """Straight paths between data and noise, like `Flow`. Only the denoiser's timestep runs the other way."""

    def model_time(self, level: Tensor) -> Tensor:
        # In the order of the pipeline's operations, so that the result is the same to the last bit.
        return (_STEPS - level.float() * _STEPS) / _STEPS
