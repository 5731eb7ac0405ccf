"""Which weight a layer's tensors fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.delta import BASE_MAGNITUDE, MAGNITUDE
from gracetune.adapters.state import Layer


def outputs(layer: Layer) -> int | None:
    """How many rows the weight has; None for (IA)3, which may scale either side."""
    return algorithm(layer.algorithm).outputs(layer.tensors)


def columns(layer: Layer) -> int | None:
    """Inputs times kernel."""
    return algorithm(layer.algorithm).columns(layer.tensors)


def flat_shape(layer: Layer) -> tuple[int, ...] | None:
    """The weight's shape where the tensors alone tell it: those of a matrix, or a difference."""
    return algorithm(layer.algorithm).weight_shape(layer.tensors)


def misfit(layer: Layer, shape: Sequence[int]) -> str | None:
    """Why the layer cannot sit on a weight of this shape [out, in, *kernel]; None where it can."""
    if len(shape) < 2:
        return f"a weight of {_by(shape) or 'one number'}, and adapters sit on matrices and convolutions"
    rows, across = shape[0], math.prod(shape[1:])
    found = outputs(layer)
    if found is not None and found != rows:
        return f"{found} outputs, the layer has {rows}"
    inner = columns(layer)
    if inner is not None and inner != across:
        return f"{inner} inputs, the layer has {across}"
    tensors = layer.tensors
    unfit = algorithm(layer.algorithm).misfit(tensors, tuple(shape))
    if unfit is not None:
        return unfit
    for name, sizes in ((MAGNITUDE, (rows, shape[1])), (BASE_MAGNITUDE, (rows,))):
        if name in tensors and tensors[name].numel() not in sizes:
            return f"a {name} of {tensors[name].numel()} for a weight of {_by(shape)}"
    return None


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
