"""A full fine-tune: the model's own parameters are trained, all of them or those of the selected modules.

What is trained is held in fp32. Where only a part is, its modules still take and give the precision of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from gracetune.adapters.targets import LayerSelection


def trained_parameters(model: nn.Module, selection: LayerSelection | None) -> dict[str, nn.Parameter]:
    """By name, in the model's own order. None selects everything."""
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
    """Inputs of the trained modules become fp32, their outputs again what the rest of the model works in."""
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
