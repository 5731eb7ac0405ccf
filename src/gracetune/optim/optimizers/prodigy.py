"""prodigyopt's Prodigy, which estimates its own learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gracetune.optim.record import OptimizerRecord, ParamGroup, StateSize, TrainedTensors, class_of, elements

if TYPE_CHECKING:
    from gracetune.config.run_config import Optimizer as OptimizerConfig


def _state_size(tensors: Sequence[TrainedTensors], options: Mapping[str, Any]) -> StateSize:
    every = slice_interval(options, 1)
    total = 8 * elements(tensors) + 8 * math.ceil(elements(tensors) / every)
    return StateSize(total, f"two fp32 moments, start and distance of {nth(every)}")


def slice_interval(options: Mapping[str, Any], default: int) -> int:
    """`slice_p`: the distance estimate uses, and stores the start of, one element in this many."""
    value = options.get("slice_p", default)
    return value if isinstance(value, int) and value > 0 else default


def nth(every: int) -> str:
    return "each" if every == 1 else f"one in {every}"


def low_rate_notes(config: OptimizerConfig, _groups: Sequence[ParamGroup]) -> list[str]:
    if config.lr >= 0.1:
        return []
    return [f"optimizer.lr: {config.name} finds its own rate and multiplies it by lr, {config.lr:g}; 1 is usual"]


RECORD = OptimizerRecord(
    load=class_of("prodigyopt:Prodigy", "prodigyopt"),
    state_size=_state_size,
    hidden=("fsdp_in_use",),
    notes=low_rate_notes,
)
