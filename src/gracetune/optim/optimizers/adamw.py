"""torch's AdamW, fused where possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gracetune.optim.record import Arguments, OptimizerRecord, class_of, per_element

if TYPE_CHECKING:
    from torch import Tensor


def _fused_where_possible(arguments: Arguments, parameters: Sequence[Tensor]) -> Arguments:
    import torch

    chosen = {"fused", "foreach", "capturable", "differentiable"} & arguments.keys()
    can = all(p.is_cuda or (p.device.type == "cpu" and p.dtype == torch.float32) for p in parameters)
    return arguments if chosen or not can else {**arguments, "fused": True}


RECORD = OptimizerRecord(
    load=class_of("torch.optim:AdamW"),
    state_size=per_element(8, "two fp32 moments"),
    prepare=_fused_where_possible,
    hidden=("state",),
    load_chunked=class_of("gracetune.optim.chunked_adamw:ChunkedAdamW"),
)
