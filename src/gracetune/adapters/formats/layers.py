"""Assembles one layer's tensors into a `Layer`. Rejects layers that are incomplete or have two ranks or no scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from gracetune.adapters.algorithms.assembly import (
    MOST_ELEMENTS,
    Convention,
    LayerError,
    check_vector,
    is_by_input,
    listed,
    sides,
)
from gracetune.adapters.algorithms.low_rank import LowRank
from gracetune.adapters.algorithms.record import Algorithm
from gracetune.adapters.algorithms.registry import algorithm, algorithms
from gracetune.adapters.delta import MAGNITUDE, columns, outputs
from gracetune.adapters.state import AdapterState, Layer
from gracetune.errors import short


def assemble(tensors: Mapping[str, Tensor], alpha: float | None, convention: Convention) -> Layer:
    """The layer that these tensors form. LoRA tensors have the names lora_A and lora_B. Raises `LayerError`."""
    record = _record(tensors)
    _check_numbers(tensors, record)
    _check_dimensions(tensors, record)
    layer = record.assemble(tensors, alpha, convention)
    _check_size(layer)
    return layer


def _record(tensors: Mapping[str, Tensor]) -> Algorithm:
    """The record that assembles these tensors. LoRA's record also assembles DoRA and LoCon."""
    names = set(tensors)
    if not names:
        raise LayerError("an alpha without any tensor to scale")
    for record in algorithms():
        if record.claims(names):
            return record
    if names == {"dora_scale"}:
        raise LayerError("dora_scale without lora_A.weight, lora_B.weight")
    if names == {"diff_b"}:
        raise LayerError("diff_b without diff")
    raise LayerError(f"tensors of more than one kind of adapter: {listed(names)}")


def _check_numbers(tensors: Mapping[str, Tensor], record: Algorithm) -> None:
    """Reject integer tensors: they belong to a quantized file, whose scales are unknown here."""
    for name, tensor in tensors.items():
        if name not in record.constants and not tensor.is_floating_point():
            raise LayerError(f"{name} holds {tensor.dtype}: the weights of an adapter are bf16, fp16 or fp32")


def _check_dimensions(tensors: Mapping[str, Tensor], record: Algorithm) -> None:
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise LayerError(f"{name} is {short(sides(tensor), 80)}: the tensor is empty")
        if not record.least_dimensions(name) <= tensor.ndim <= record.most_dimensions(name):
            raise LayerError(f"{name} is {short(sides(tensor), 80)}: not the shape of such a tensor")


def _check_size(layer: Layer) -> None:
    """Reject factors whose product would be a weight too large for any machine, and magnitudes of the wrong size."""
    rows, across = outputs(layer), columns(layer)
    elements = max(1 if rows is None else rows, 1) * max(1 if across is None else across, 1)
    if max(elements, *(tensor.numel() for tensor in layer.tensors.values())) > MOST_ELEMENTS:
        size = f"{rows:,} x {across:,}" if rows and across else "one tensor"
        raise LayerError(f"a change of {size}: no model has a weight of more than {MOST_ELEMENTS:,} numbers")
    magnitude = layer.tensors.get(MAGNITUDE)
    if magnitude is None:
        return
    check_vector(MAGNITUDE, magnitude)
    by_input = across is not None and is_by_input(magnitude, rows or 0) and across % magnitude.numel() == 0
    if rows is not None and magnitude.numel() != rows and not by_input:
        raise LayerError(f"{MAGNITUDE} {sides(magnitude)} for {rows:,} outputs")


# -- summaries of a state ---------------------------------------------------------------------------------------------


def algorithm_names(state: AdapterState) -> tuple[str, ...]:
    """The algorithms of a state's layers, the most frequent first."""
    return tuple(kind for kind, _ in Counter(layer.algorithm for layer in state.layers.values()).most_common())


def common_rank(state: AdapterState) -> int | None:
    """The most frequent rank; None if no layer is decomposed."""
    ranks = Counter(layer.rank for layer in state.layers.values() if layer.rank is not None)
    return ranks.most_common(1)[0][0] if ranks else None


def common_alpha(state: AdapterState) -> float | None:
    """The most frequent alpha; None if no layer is decomposed."""
    alphas = Counter(layer.alpha for layer in state.layers.values() if layer.rank is not None)
    return alphas.most_common(1)[0][0] if alphas else None


def is_plain_lora(layer: Layer) -> bool:
    """Whether the layer has only a down and an up matrix: neither DoRA nor a Tucker form."""
    record = algorithm(layer.algorithm)
    return isinstance(record, LowRank) and layer.tensors.keys() == {record.down, record.up}


def is_in_a_block(path: str) -> bool:
    """Whether the layer belongs to a block, not to the layers before or after all blocks.

    Lists of blocks are called so, or are the model's own lists (`layers.3.attention.to_q`).
    """
    parts = path.split(".")
    in_own_list = len(parts) > 2 and parts[1].isdigit()
    return in_own_list or any(part.endswith(("block", "blocks")) for part in parts)
