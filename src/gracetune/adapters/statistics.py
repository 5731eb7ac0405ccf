"""How large an adapter's changes are, and which of its tensors are empty or broken, without building the changes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gracetune.adapters.delta import delta, kronecker_factors, needs_weight
from gracetune.adapters.shapes import columns, outputs
from gracetune.adapters.state import AdapterState, Layer


@dataclass(frozen=True)
class Norms:
    """Frobenius norms of the layers' changes; of the parameters where the change depends on the weight."""

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
    return all(bool(tensor.isfinite().all()) for tensor in layer.tensors.values())


def change_norm(layer: Layer) -> float:
    tensors = {name: tensor.detach().float() for name, tensor in layer.tensors.items()}
    if needs_weight(layer):
        return math.sqrt(sum(float(tensor.square().sum()) for name, tensor in tensors.items() if name != "on_input"))
    if layer.algorithm == "lokr":
        first, second = kronecker_factors(tensors)
        return abs(layer.scale) * float(first.norm() * second.norm())
    pair = _pair(layer, tensors)
    if pair is not None:
        up, down = pair[0].flatten(1).double(), pair[1].flatten(1).double()
        # |BA|^2 = tr(B'B AA'): two matrices of the rank's size instead of one of the weight's.
        squared = float(((up.T @ up) * (down @ down.T)).sum())
        return abs(layer.scale) * math.sqrt(max(0.0, squared))
    if layer.algorithm == "full_delta":
        return float(tensors["diff"].norm())
    # The norm does not depend on how the columns are folded into a kernel.
    return float(delta(layer, (outputs(layer) or 0, columns(layer) or 0)).norm())


def _pair(layer: Layer, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    if layer.algorithm == "lora":
        return tensors["lora_B.weight"], tensors["lora_A.weight"]
    if layer.algorithm == "locon" and "lora_mid.weight" not in tensors:
        return tensors["lora_up.weight"], tensors["lora_down.weight"]
    return None


def zero_tensors(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Keys of weights that are zero throughout. alpha and on_input are no weights."""
    return tuple(key for key, tensor in tensors.items() if not key.endswith(("alpha", "on_input")) and not tensor.any())
