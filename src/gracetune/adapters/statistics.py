"""Statistics of an adapter: the norms of its changes, and the tensors that are zero or not finite.

Norms are computed from the factors, without building the changes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from gracetune.adapters.algorithms.matrices import ROWS, is_finite
from gracetune.adapters.algorithms.registry import algorithm, algorithms
from gracetune.adapters.delta import columns, delta, needs_weight, outputs
from gracetune.adapters.state import AdapterState, Layer

_LARGEST_BUILT = 1 << 28
"""The most elements of a change that is built to be measured: 1 GiB in fp32. Our own algorithms need no building."""


@dataclass(frozen=True)
class Norms:
    """Frobenius norms of the layers' changes.

    The norm of the parameters stands in where the change depends on the weight, or where an algorithm of another
    package has no `norm` and the change is too large to be built.
    """

    smallest: float
    median: float
    largest: float
    largest_layer: str
    unchanged: tuple[str, ...]
    """Layers whose change is exactly zero, as before the first step."""
    not_finite: tuple[str, ...]
    """Layers with NaN or infinity in a tensor or in the norm. They are excluded from the numbers above."""


def norms(state: AdapterState) -> Norms:
    changes = {path: change_norm(layer) for path, layer in state.layers.items() if _is_finite(layer)}
    found = {path: value for path, value in changes.items() if math.isfinite(value)}
    values = list(found.values()) or [math.nan]
    largest = max(found, key=lambda path: found[path], default="")
    unchanged = tuple(path for path, value in found.items() if value == 0)
    not_finite = tuple(path for path in state.layers if path not in found)
    return Norms(min(values), statistics.median(values), max(values), largest, unchanged, not_finite)


def _is_finite(layer: Layer) -> bool:
    return all(map(is_finite, layer.tensors.values()))


def change_norm(layer: Layer) -> float:
    tensors = {name: tensor.detach().float() for name, tensor in layer.tensors.items()}
    record = algorithm(layer.algorithm)
    trained = [tensor for name, tensor in tensors.items() if name not in record.constants]
    if needs_weight(layer):
        return _norm_of_all(trained)
    found = record.norm(tensors, layer.scale)
    if found is not None:
        return found
    rows, across = outputs(layer), columns(layer)
    if rows is None or across is None or rows * across > _LARGEST_BUILT:  # a record may not know its layer's width
        at_first = [tensors[name] for name in record.zero_at_first if name in tensors]
        return 0.0 if at_first and not any(tensor.any() for tensor in at_first) else _norm_of_all(trained)
    # The Frobenius norm is the same for the flattened weight [out, in * kernel].
    return float(delta(layer, (rows, across)).norm())


def _norm_of_all(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def estimate_note(states: Iterable[AdapterState]) -> str | None:
    """A sentence on how many norms are estimates; None if none is."""
    layers = [
        layer
        for state in states
        for layer in state.layers.values()
        if not needs_weight(layer) and algorithm(layer.algorithm).estimates_norm(layer.tensors)
    ]
    if not layers:
        return None
    return f"the norms of {len(layers)} layers are estimated, each from {ROWS} of its rows"


def zero_tensors(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Keys of weights whose elements are all zero. alpha and (IA)3's flag do not count as weights."""
    others = ("alpha", *(name for record in algorithms() for name in record.constants))
    return tuple(key for key, tensor in tensors.items() if not key.endswith(others) and not tensor.any())
