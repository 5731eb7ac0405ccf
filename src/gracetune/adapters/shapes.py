"""Which weight a layer's tensors fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from gracetune.adapters.delta import BASE_MAGNITUDE, MAGNITUDE
from gracetune.adapters.state import Layer


def outputs(layer: Layer) -> int | None:
    """How many rows the weight has; None for (IA)3, which may scale either side."""
    found = layer.tensors
    if layer.algorithm in ("lora", "dora"):
        return found["lora_B.weight"].shape[0]
    if layer.algorithm == "locon":
        return found["lora_up.weight"].shape[0]
    if layer.algorithm == "loha":
        return found["hada_w1_a"].shape[1 if "hada_t1" in found else 0]
    if layer.algorithm == "lokr":
        return _rows(found, "lokr_w1") * _rows(found, "lokr_w2")
    if layer.algorithm == "diag_oft":
        return found["oft_blocks"].shape[0] * found["oft_blocks"].shape[1]
    return found["diff"].shape[0] if layer.algorithm == "full_delta" else None


def flat_shape(layer: Layer) -> tuple[int, ...] | None:
    """The weight's shape where the tensors alone tell it: those of a matrix, or a difference."""
    if layer.algorithm == "full_delta":
        return tuple(layer.tensors["diff"].shape)
    rows, inner = outputs(layer), columns(layer)
    if rows is None or inner is None or any(tensor.ndim > 2 for tensor in layer.tensors.values()):
        return None
    return rows, inner


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
    if layer.algorithm == "full_delta" and tuple(tensors["diff"].shape) != tuple(shape):
        return f"a difference of {_by(tensors['diff'].shape)} for a weight of {_by(shape)}"
    if "diff_b" in tensors and tensors["diff_b"].numel() != rows:
        return f"a bias of {tensors['diff_b'].numel()} for {rows} outputs"
    if layer.algorithm == "ia3":
        wanted = shape[1] if bool(tensors["on_input"].item()) else rows
        if tensors["weight"].numel() != wanted:
            return f"{tensors['weight'].numel()} factors for {wanted} channels"
    for name, sizes in ((MAGNITUDE, (rows, shape[1])), (BASE_MAGNITUDE, (rows,))):
        if name in tensors and tensors[name].numel() not in sizes:
            return f"a {name} of {tensors[name].numel()} for a weight of {_by(shape)}"
    return None


def columns(layer: Layer) -> int | None:
    """Inputs times kernel."""
    found = layer.tensors
    if layer.algorithm in ("lora", "dora"):
        return math.prod(found["lora_A.weight"].shape[1:])
    if layer.algorithm == "locon":
        middle = found.get("lora_mid.weight")
        return math.prod(found["lora_down.weight"].shape[1:]) * (1 if middle is None else math.prod(middle.shape[2:]))
    if layer.algorithm == "loha":
        return found["hada_w1_b"].shape[1] * _kernel(found.get("hada_t1"))
    if layer.algorithm == "lokr":
        second = found.get("lokr_w2")
        if second is None:
            inner = found["lokr_w2_b"].shape[1] * _kernel(found.get("lokr_t2"))
        else:
            inner = math.prod(second.shape[1:])
        first = found.get("lokr_w1")
        return (found["lokr_w1_b"] if first is None else first).shape[1] * inner
    return None


def _rows(tensors: Mapping[str, Tensor], factor: str) -> int:
    if factor in tensors:
        return tensors[factor].shape[0]
    return tensors[f"{factor}_a"].shape[1 if factor == "lokr_w2" and "lokr_t2" in tensors else 0]


def _kernel(core: Tensor | None) -> int:
    return 1 if core is None else math.prod(core.shape[2:])


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
