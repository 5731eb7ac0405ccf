"""The weight shape that a layer's tensors imply, and whether it fits a given weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gracetune.adapters.algorithms.record import algorithm
from gracetune.adapters.delta import BASE_MAGNITUDE, MAGNITUDE
from gracetune.adapters.state import Layer


def outputs(layer: Layer) -> int | None:
    """The number of rows of the weight; None for (IA)3, which may scale either side."""
    return algorithm(layer.algorithm).outputs(layer.tensors)


def columns(layer: Layer) -> int | None:
    """The number of columns of the flattened weight: inputs times kernel points."""
    return algorithm(layer.algorithm).columns(layer.tensors)


def flat_shape(layer: Layer) -> tuple[int, ...] | None:
    """The weight's shape, if the tensors alone determine it: for a matrix, or for a full difference."""
    return algorithm(layer.algorithm).weight_shape(layer.tensors)


def misfit(layer: Layer, shape: Sequence[int]) -> str | None:
    """Why the layer does not fit a weight of this shape [out, in, *kernel]; None if it fits."""
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
    """A shape as text, such as 64x3x3."""
    return "x".join(map(str, shape))
