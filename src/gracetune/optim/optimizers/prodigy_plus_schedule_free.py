"""prodigy-plus-schedule-free: Prodigy with weight averaging in place of a learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gracetune.optim.optimizers.prodigy import low_rate_notes, nth, slice_interval
from gracetune.optim.record import OptimizerRecord, StateSize, TrainedTensors, class_of, elements, factored


def _state_size(tensors: Sequence[TrainedTensors], options: Mapping[str, Any]) -> StateSize:
    every = slice_interval(options, 11)
    second = factored(tensors) if options.get("factored", True) else 4 * elements(tensors)
    total = 4 * elements(tensors) + second + 8 * math.ceil(elements(tensors) / every)
    return StateSize(total, f"z in fp32, second moment, start and distance of {nth(every)}")


RECORD = OptimizerRecord(
    load=class_of("prodigyplus.prodigy_plus_schedulefree:ProdigyPlusScheduleFree", "prodigy-plus-schedule-free"),
    state_size=_state_size,
    hidden=("fused_back_pass",),
    constant_rate="averaging takes the place of a falling rate",
    notes=low_rate_notes,
)
