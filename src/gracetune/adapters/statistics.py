"""How large an adapter's changes are, and which of its tensors are empty or broken, without building the changes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from gracetune.adapters.algorithms.matrices import ROWS, is_finite
from gracetune.adapters.algorithms.registry import algorithm, algorithms
from gracetune.adapters.delta import delta, needs_weight
from gracetune.adapters.shapes import columns, outputs
from gracetune.adapters.state import AdapterState, Layer

_LARGEST_BUILT = 1 << 28
"""Numbers of a change that is built to be measured: 1 GiB. All of our own algorithms measure their factors."""


@dataclass(frozen=True)
class Norms:
    """Frobenius norms of the layers' changes; of the parameters where the change depends on the weight, or where an
    algorithm of another package does not say how to measure it and it is too large to be built."""

    smallest: float
    median: float
    largest: float
    largest_layer: str
    unchanged: tuple[str, ...]
    """Layers whose change is exactly zero: as they are before the first step."""
    not_finite: tuple[str, ...]
    """Layers with a NaN or an infinity in them, or in the norm of their change: in none of the numbers above."""


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
    of_parameters = math.sqrt(sum(float(tensor.square().sum()) for tensor in trained))
    if needs_weight(layer):
        return of_parameters
    found = record.norm(tensors, layer.scale)
    if found is not None:
        return found
    rows, across = outputs(layer), columns(layer)
    if rows is None or across is None or rows * across > _LARGEST_BUILT:  # a record need not say how wide its layer is
        at_first = [tensors[name] for name in record.zero_at_first if name in tensors]
        return 0.0 if at_first and not any(tensor.any() for tensor in at_first) else of_parameters
    # The norm does not depend on how the columns are folded into a kernel.
    return float(delta(layer, (rows, across)).norm())


def estimate_note(states: Iterable[AdapterState]) -> str | None:
    """Which of `norms` are estimates."""
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
    """Keys of weights that are zero throughout. alpha and (IA)3's flag are no weights."""
    others = ("alpha", *(name for record in algorithms() for name in record.constants))
    return tuple(key for key, tensor in tensors.items() if not key.endswith(others) and not tensor.any())
