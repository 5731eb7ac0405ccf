"""torch's Adafactor, which scales its steps by the RMS of the parameters, so `lr` is a relative step size.

    step = lr_t max(eps2, RMS(p)),  lr_t = min(lr, 1 / sqrt(t))

`adafactor` is transformers' version, whose step is `lr` itself unless `scale_parameter` is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gracetune.optim.record import Arguments, OptimizerRecord, StateSize, TrainedTensors, factored

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


def _load(_parameters: Sequence[Tensor]) -> type[Optimizer]:
    from torch.optim import Adafactor

    class TorchAdafactor(Adafactor):
        """A name of its own for saved state: transformers' class is also called Adafactor, and its state differs."""

    return TorchAdafactor


def _prepare(arguments: Arguments, _parameters: Sequence[Tensor]) -> Arguments:
    # `optimizer.eps` is one number and torch takes two. The first one limits how far small gradients are scaled up.
    if isinstance(arguments.get("eps"), float):
        arguments = {**arguments, "eps": (arguments["eps"], 1e-3)}
    return arguments


def _state_size(tensors: Sequence[TrainedTensors], _options: Mapping[str, Any]) -> StateSize:
    return StateSize(factored(tensors), "one fp32 row and column per matrix")


RECORD = OptimizerRecord(load=_load, state_size=_state_size, prepare=_prepare)
