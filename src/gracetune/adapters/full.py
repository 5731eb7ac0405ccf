"""Full fine-tuning: trains the model's own parameters, either all of them or those of the selected modules.

Trained parameters are fp32. If only some modules are trained, hooks cast their inputs to fp32 and their outputs back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from gracetune.adapters.targets import LayerSelection


def trained_parameters(model: nn.Module, selection: LayerSelection | None) -> dict[str, nn.Parameter]:
    """The trained parameters by name, in the model's order. A selection of None means all of them."""
    everything = dict(model.named_parameters())
    if selection is None:
        return everything
    chosen = {name for path in selection.paths for name in _names(model, path)}
    return {name: parameter for name, parameter in everything.items() if name in chosen}


def _names(model: nn.Module, path: str) -> Iterator[str]:
    parent, _, last = path.rpartition(".")
    if last in model.get_submodule(parent)._parameters:
        yield path  # a parameter that stands alone, such as Wan's scale_shift_table
        return
    for name, _parameter in model.get_submodule(path).named_parameters(recurse=False):
        yield f"{path}.{name}"


def bridge(model: nn.Module, selection: LayerSelection, undo: ExitStack) -> None:
    """Cast the inputs of the selected modules to fp32, and their outputs back to the precision they had before.

    Call it before the parameters become fp32: the precision of the outputs is read from them.
    """
    for path in selection.paths:
        parent, _, last = path.rpartition(".")
        if last in model.get_submodule(parent)._parameters:
            continue
        module = model.get_submodule(path)
        dtypes = {parameter.dtype for parameter in module.parameters(recurse=False)}
        if dtypes and dtypes != {torch.float32}:
            undo.callback(module.register_forward_pre_hook(_to_fp32).remove)
            undo.callback(module.register_forward_hook(_back_to(dtypes.pop())).remove)


def _to_fp32(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def _back_to(dtype: torch.dtype) -> Any:
    def cast_back(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.to(dtype)

    return cast_back
