"""prodigyopt's Prodigy, which finds its own learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gracetune.optim.record import OptimizerRecord, ParamGroup, StateSize, TrainedTensors, class_of, elements

if TYPE_CHECKING:
    from gracetune.config.run_config import Optimizer as OptimizerConfig


def _state_size(tensors: Sequence[TrainedTensors], options: Mapping[str, Any]) -> StateSize:
    every = kept_of(options, 1)
    total = 8 * elements(tensors) + 8 * math.ceil(elements(tensors) / every)
    return StateSize(total, f"two fp32 moments, start and distance of {nth(every)}")


def kept_of(options: Mapping[str, Any], default: int) -> int:
    """`slice_p`: the start and the distance are kept of one element in so many."""
    value = options.get("slice_p", default)
    return value if isinstance(value, int) and value > 0 else default


def nth(every: int) -> str:
    return "each" if every == 1 else f"one in {every}"


def low_rate(config: OptimizerConfig, _groups: Sequence[ParamGroup]) -> list[str]:
    if config.lr >= 0.1:
        return []
    return [f"optimizer.lr: {config.name} finds its own rate and multiplies it by lr, {config.lr:g}; 1 is usual"]


RECORD = OptimizerRecord(
    load=class_of("prodigyopt:Prodigy", "prodigyopt"),
    state_size=_state_size,
    hidden=("fsdp_in_use",),
    notes=low_rate,
)
