"""The change that an adapter layer makes to a weight, in fp32. The formulas are in the records (`algorithms/`).

DoRA applies to the change D of any algorithm, with a magnitude m for each row of the weight W:

    dora_scale         m (W + D) / |W + D| - W    (m for each column in files of older LyCORIS)
    dora_base_scale    m (W + D) / |W| - W        (how ComfyUI interprets a dora_scale by rows)

The reference path of training uses these functions (`change`), and tests compare the factorised forms
(`fast.products`) with it. So training, merging and conversion agree. We do not use the library's formulas: LyCORIS 4.1
multiplies the merged weights of LoKr and LoHa by the scale twice, rounds the delta of its forward pass to the precision
of a 16-bit base weight, and rotates or scales the bias in some paths only.

A layer's tensors also imply the shape of the weight that they change (`outputs`, `columns`, `misfit`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gracetune.adapters.algorithms.record import Algorithm
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.state import Layer

Tensors = Mapping[str, Tensor]
MAGNITUDE, BASE_MAGNITUDE = "dora_scale", "dora_base_scale"
EPSILON = torch.finfo(torch.float32).eps


def delta(layer: Layer, weight_shape: Sequence[int]) -> Tensor:
    """The layer's change to a weight of this shape. Raises `ValueError` if the change depends on the weight itself."""
    if needs_weight(layer):
        raise ValueError(f"what {_described(layer)} changes depends on the weight it sits on: use `apply`")
    return change(algorithm(layer.algorithm), _fp32(layer), layer.scale, torch.Size(weight_shape))


def apply(layer: Layer, weight: Tensor, *, strength: float = 1.0) -> Tensor:
    """The weight with the layer merged in, in fp32. `strength` interpolates from the base weight (0) to the adapted
    weight (1)."""
    base = weight.detach().float()
    record = algorithm(layer.algorithm)
    # Flags stay on the CPU: reading their value from a GPU tensor would synchronize.
    tensors = {
        name: tensor if name in record.constants else tensor.to(base.device) for name, tensor in _fp32(layer).items()
    }
    return base + strength * change(record, tensors, layer.scale, base.shape, base)


def bias_delta(layer: Layer) -> Tensor | None:
    name = algorithm(layer.algorithm).bias_tensor
    found = None if name is None else layer.tensors.get(name)
    return None if found is None else found.detach().float()


def needs_weight(layer: Layer) -> bool:
    return algorithm(layer.algorithm).depends_on_weight or not {MAGNITUDE, BASE_MAGNITUDE}.isdisjoint(layer.tensors)


def with_base_magnitude(layer: Layer, weight: Tensor) -> Layer:
    """Convert a DoRA with row magnitudes for ComfyUI, which divides by |W| where training divides by |W + D|.

    Returns other layers unchanged. Column magnitudes need no conversion: ComfyUI divides them by the right norms.
    """
    magnitude, record = layer.tensors.get(MAGNITUDE), algorithm(layer.algorithm)
    if magnitude is None or _by_columns(record, magnitude, weight.shape):
        return layer
    base = weight.detach().float()
    tensors = {name: tensor.to(base.device) for name, tensor in _fp32(layer).items() if name != MAGNITUDE}
    added = change(record, tensors, layer.scale, base.shape)
    ratio = (_row_norms(base) + EPSILON) / (_row_norms(base + added) + EPSILON)
    others = {name: tensor for name, tensor in layer.tensors.items() if name != MAGNITUDE}
    scaled = _rows(magnitude.detach().float().flatten() * ratio.cpu(), base.shape)
    return Layer(layer.algorithm, {**others, BASE_MAGNITUDE: scaled}, layer.alpha, layer.rank)


def with_trained_magnitude(layer: Layer, weight: Tensor) -> Layer:
    """The inverse of `with_base_magnitude`: restore the trained magnitudes of a DoRA that was written for ComfyUI."""
    magnitude = layer.tensors.get(BASE_MAGNITUDE)
    if magnitude is None:
        return layer
    base = weight.detach().float()
    others = {name: tensor for name, tensor in layer.tensors.items() if name != BASE_MAGNITUDE}
    factors = {name: tensor.to(base.device) for name, tensor in _fp32(layer).items() if name != BASE_MAGNITUDE}
    added = change(algorithm(layer.algorithm), factors, layer.scale, base.shape)
    ratio = (_row_norms(base + added) + EPSILON) / (_row_norms(base) + EPSILON)
    scaled = magnitude.detach().float().flatten() * ratio.cpu()
    return Layer(layer.algorithm, {**others, MAGNITUDE: scaled}, layer.alpha, layer.rank)


def change(
    record: Algorithm, tensors: Tensors, scale: float, shape: torch.Size, weight: Tensor | None = None
) -> Tensor:
    """The change to a weight [out, in, *kernel]. It is differentiable with respect to `tensors`."""
    if record.depends_on_weight:
        if weight is None:
            raise ValueError(f"{record.name} needs the weight it changes")
        return record.changed(tensors, weight)
    added = record.added(tensors, shape)
    if scale != 1.0:
        added = added * scale
    if MAGNITUDE not in tensors and BASE_MAGNITUDE not in tensors:
        return added
    if weight is None:
        raise ValueError("DoRA needs the weight it changes")
    if BASE_MAGNITUDE in tensors:
        factor = tensors[BASE_MAGNITUDE].flatten() / (_row_norms(weight) + EPSILON)
        return _rows(factor, shape) * (weight + added) - weight
    columns = _by_columns(record, tensors[MAGNITUDE], shape)
    return _normalised(weight + added, tensors[MAGNITUDE], columns=columns) - weight


def _normalised(weight: Tensor, magnitude: Tensor, *, columns: bool) -> Tensor:
    """The weight with its rows (outputs) or, in files of older LyCORIS, its columns (inputs) scaled to `magnitude`."""
    if not columns:
        return weight * _rows(magnitude.flatten() / (_row_norms(weight) + EPSILON), weight.shape)
    length: Tensor = weight.transpose(0, 1).flatten(1).norm(dim=1)
    trailing = (1,) * (weight.dim() - 2)
    return weight * (magnitude.flatten() / (length + EPSILON)).reshape(1, -1, *trailing)


def _row_norms(weight: Tensor) -> Tensor:
    norms: Tensor = weight.flatten(1).norm(dim=1)
    return norms


def _rows(values: Tensor, shape: torch.Size) -> Tensor:
    """[out] as [out, 1, ...], so that it broadcasts over the rows of a weight of this shape."""
    return values.reshape(-1, *(1,) * (len(shape) - 1))


def _by_columns(record: Algorithm, magnitude: Tensor, shape: torch.Size) -> bool:
    """LyCORIS' own rule: a magnitude [1, in, 1, 1] is by columns, [out, 1, 1, 1] by rows."""
    if record.magnitude_by_rows:
        return False
    return magnitude.dim() > 1 and magnitude.shape[0] == 1 and magnitude.numel() == shape[1] and shape[0] != 1


def _fp32(layer: Layer) -> dict[str, Tensor]:
    return {name: tensor.detach().float() for name, tensor in layer.tensors.items()}


def _described(layer: Layer) -> str:
    return layer.algorithm if algorithm(layer.algorithm).depends_on_weight else f"{layer.algorithm} with dora_scale"


# -- the weight's shape ------------------------------------------------------------------------------------------------


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
