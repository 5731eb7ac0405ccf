"""Our Lion (`optim/lion.py`)."""

from __future__ import annotations

from gracetune.optim.record import OptimizerRecord, class_of, per_element

RECORD = OptimizerRecord(
    load=class_of("gracetune.optim.lion:Lion"),
    state_size=per_element(4, "one fp32 momentum"),
    no_effect={"use_triton": "ours is one pass over all tensors already"},
)
