"""The choice of layers whose weights are held in 8 bits, and the loading of those weights.

Weights are read (or initialized) a few at a time in their own precision, quantized, and released. The full-precision
model is never in memory as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from gracetune.errors import ConfigError, Problem
from gracetune.memory.weights.loading import Progress, load_into
from gracetune.models.eight_bit_linear import FP8_SIDE, EightBitLinear, Fp8Linear, Int8Linear
from gracetune.models.spec import EightBitLayers
from gracetune.storage.safetensors_files import TORCH_DTYPES
from gracetune.storage.safetensors_headers import WeightFiles
from gracetune.units import MIB

AT_ONCE = 512 * MIB
"""Bytes of weights that are read together. A single larger weight is read on its own."""
_WEIGHT = ".weight"

Put = Callable[[str, Tensor], None]
"""Receives a weight by name, as it was read, and replaces its layer by an 8-bit one."""


def eight_bit_weights(model: nn.Module, held: EightBitLayers, exact: Collection[str] = ()) -> frozenset[str]:
    """Names of the weights to hold in 8 bits: the linear layers that match the patterns.

    fp8 additionally needs sides that the matrix units support. Excluded are layers inside a module named in `exact`,
    and weights that two layers share.
    """
    owners = Counter(id(module.weight) for module in model.modules() if isinstance(module, nn.Linear))
    names = frozenset(
        path + _WEIGHT
        for path, layer in matching_layers(model, held.layers)
        if (held.kind == "int8" or fp8_supports(layer))
        and owners[id(layer.weight)] == 1
        and set(exact).isdisjoint(path.split("."))
    )
    if not names:
        sides = "" if held.kind == "int8" else f" with sides that are multiples of {FP8_SIDE}"
        expected = f"linear layers named {', '.join(held.layers[:3])}{sides}"
        hint = "--set model.base_precision=bf16"
        found = f"{held.kind}, for a model without any layer it applies to"
        raise ConfigError([Problem("model.base_precision", found, expected, hint)])
    return names


def matching_layers(model: nn.Module, patterns: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers whose path matches one of the patterns."""
    split = [pattern.split(".") for pattern in patterns]
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and any(_matches(path.split("."), pattern) for pattern in split):
            yield path, module


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Whether the pattern's parts match consecutive parts anywhere in the path."""
    return any(
        all(fnmatchcase(part, wanted) for part, wanted in zip(parts[start:], pattern, strict=False))
        for start in range(len(parts) - len(pattern) + 1)
    )


def fp8_supports(layer: nn.Linear) -> bool:
    """Whether both sides of the layer are multiples of `FP8_SIDE`."""
    return layer.in_features % FP8_SIDE == 0 and layer.out_features % FP8_SIDE == 0


def put_into(model: nn.Module, held: EightBitLayers, device: torch.device) -> Put:
    """A `Put` that quantizes each weight on `device` and replaces its layer in `model`."""

    def put(name: str, weight: Tensor) -> None:
        path = name.removesuffix(_WEIGHT)
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(path, _in_eight_bits(weight.to(device), linear.bias, held), strict=True)

    return put


def _in_eight_bits(weight: Tensor, bias: nn.Parameter | None, held: EightBitLayers) -> EightBitLinear:
    return Int8Linear(weight, bias) if held.kind == "int8" else Fp8Linear(weight, bias, held.layouts)


def read(
    weights: WeightFiles, wanted: Mapping[str, Tensor], device: torch.device, put: Put, progress: Progress
) -> None:
    """Read these weights in the precision of the file and pass each one to `put`, which quantizes it.

    Only the names of `wanted` matter. The caller has checked names and shapes.
    """
    for names in groups({name: weights.entries[name].size for name in wanted}):
        entries = {name: weights.entries[name] for name in names}
        tensors = {
            name: torch.empty(entry.shape, dtype=_precision(entry.dtype), device=device)
            for name, entry in entries.items()
        }
        load_into(replace(weights, entries=entries), tensors, progress=progress)
        for name in names:
            put(name, tensors.pop(name))


def _precision(name: str) -> torch.dtype:
    """The dtype to read into: 8-bit floats in the file are widened to bf16."""
    dtype = TORCH_DTYPES[name]
    return dtype if dtype.itemsize > 1 else torch.bfloat16


def readable(weights: WeightFiles, name: str, wanted: Tensor) -> bool:
    """Whether the file has a floating-point weight of this name and shape."""
    entry = weights.entries.get(name)
    if entry is None or entry.shape != tuple(wanted.shape) or entry.dtype not in TORCH_DTYPES:
        return False
    return TORCH_DTYPES[entry.dtype].is_floating_point


def groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names in order, grouped so that each group has at most `AT_ONCE` bytes. A larger one is a group of its own."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > AT_ONCE:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


def eight_bit_line(model: nn.Module, patterns: Collection[str]) -> str:
    """One line about the 8-bit layers, for the run's list of decisions."""
    layers = [layer for _, layer in matching_layers(model, patterns)]
    int8 = sum(isinstance(layer, Int8Linear) for layer in layers)
    if int8:
        rest = f"; {len(layers) - int8} are not quantized: two layers share a weight" if len(layers) > int8 else ""
        return f"base weights: int8 for {int8:,} layers (one scale per row), multiplied in 16 bits{rest}"
    fp8 = [layer for layer in layers if isinstance(layer, Fp8Linear)]
    both = sum(layer.fp8_transposed is not None for layer in fp8)
    layouts = "in both layouts: no transpose in a step" if both else "in one layout, transposed in the backward pass"
    left = len(layers) - len(fp8)
    rest = (
        f"; {left} are not quantized: their sides are not multiples of {FP8_SIDE}, or two layers share a weight"
        if left
        else ""
    )
    return f"base weights: fp8 for {len(fp8):,} layers (e4m3, one scale per row), {layouts}{rest}"
