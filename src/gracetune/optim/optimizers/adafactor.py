"""transformers' Adafactor, with the config's learning rate unless `relative_step` is set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gracetune.optim.record import (
    Arguments,
    OptimizerRecord,
    ParamGroup,
    StateSize,
    TrainedTensors,
    class_of,
    elements,
    factored,
)

if TYPE_CHECKING:
    from torch import Tensor

    from gracetune.config.run_config import Optimizer as OptimizerConfig

_FP32 = "trained parameters are fp32, so nothing is rounded"


def _prepare(arguments: Arguments, _parameters: Sequence[Tensor]) -> Arguments:
    # The defaults of transformers (relative_step, scale_parameter) train without a learning rate; a config has one.
    arguments = {"relative_step": False, "scale_parameter": False, **arguments}
    if isinstance(arguments.get("eps"), float):  # the class takes two; the second is its default
        arguments["eps"] = (arguments["eps"], 1e-3)
    return {**arguments, "lr": None} if arguments["relative_step"] else arguments


def _state_size(tensors: Sequence[TrainedTensors], options: Mapping[str, Any]) -> StateSize:
    momentum = 4 * elements(tensors) if options.get("beta1") is not None else 0
    what = "one fp32 row and column per matrix" + (" and an fp32 momentum" if momentum else "")
    return StateSize(factored(tensors) + momentum, what)


def _notes(config: OptimizerConfig, _groups: Sequence[ParamGroup]) -> list[str]:
    if not config.options.get("relative_step"):
        return []
    return ["optimizer.lr: not used, relative_step makes Adafactor set its own rate"]


RECORD = OptimizerRecord(
    load=class_of("transformers.optimization:Adafactor", "transformers"),
    state_size=_state_size,
    prepare=_prepare,
    no_effect={"stochastic_accumulation": _FP32, "stochastic_rounding": _FP32},
    notes=_notes,
)
