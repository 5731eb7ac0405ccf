"""bitsandbytes' AdamW8bit: two moments of one byte each. It needs a CUDA GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gracetune.errors import ConfigError, Problem
from gracetune.optim.record import OptimizerRecord, StateSize, TrainedTensors, class_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_SMALLEST = 4096
"""Tensors with fewer elements keep fp32 moments (bitsandbytes' `min_8bit_size`)."""
_BLOCK = 256
"""Elements that share one fp32 scale."""


def _load(parameters: Sequence[Tensor]) -> type[Optimizer]:
    elsewhere = next((parameter.device for parameter in parameters if not parameter.is_cuda), None)
    if elsewhere is not None:
        expected = f"parameters on a CUDA GPU; these are on {elsewhere}"
        raise ConfigError([Problem("optimizer.name", "adamw_8bit", expected, "--set optimizer.name=adamw")])
    return class_of("bitsandbytes.optim:AdamW8bit", "bitsandbytes")(parameters)


def _state_size(tensors: Sequence[TrainedTensors], _options: Mapping[str, Any]) -> StateSize:
    total = 0
    for tensor in tensors:
        size = math.prod(tensor.shape)
        if size < _SMALLEST:
            total += 8 * tensor.elements
        else:
            total += 2 * (size + 4 * math.ceil(size / _BLOCK)) * tensor.count
    return StateSize(total, "two moments of a byte, a scale per 256 (small tensors: fp32)")


RECORD = OptimizerRecord(load=_load, state_size=_state_size)
