"""Which layers of a model are held in 8 bits, and how their weights get there without a copy of all of them.

A few weights at a time are read (or drawn) into memory of their own precision, rounded, and let go of.
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
from gracetune.models.eight_bit_linear import EightBitLinear
from gracetune.models.fp8 import SIDE, Fp8Linear
from gracetune.models.int8 import Int8Linear
from gracetune.models.spec import EightBits
from gracetune.storage.safetensors_files import TORCH_DTYPES
from gracetune.storage.safetensors_headers import Weights
from gracetune.units import MIB

AT_ONCE = 512 * MIB
"""So many bytes of weights are read together, or one weight, if that is larger."""
_WEIGHT = ".weight"

Put = Callable[[str, Tensor], None]
"""Takes the weight of that name, as it was read; the layer is held in 8 bits from then on."""


def eight_bit_weights(model: nn.Module, held: EightBits, exact: Collection[str] = ()) -> frozenset[str]:
    """Names of the weights to hold in 8 bits: of linear layers the patterns name; in fp8, of those whose sides the
    matrix units take.

    Not of layers below a module called as one of `exact`, nor such as two layers share.
    """
    owners = Counter(id(module.weight) for module in model.modules() if isinstance(module, nn.Linear))
    names = frozenset(
        path + _WEIGHT
        for path, layer in listed(model, held.layers)
        if (held.kind == "int8" or fits(layer))
        and owners[id(layer.weight)] == 1
        and set(exact).isdisjoint(path.split("."))
    )
    if not names:
        sides = "" if held.kind == "int8" else f" with sides that are multiples of {SIDE}"
        expected = f"linear layers named {', '.join(held.layers[:3])}{sides}"
        hint = "--set model.base_precision=bf16"
        found = f"{held.kind}, and no layer it could be used for"
        raise ConfigError([Problem("model.base_precision", found, expected, hint)])
    return names


def listed(model: nn.Module, patterns: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
    split = [pattern.split(".") for pattern in patterns]
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and any(_matches(path.split("."), pattern) for pattern in split):
            yield path, module


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """A pattern is a run of parts anywhere in the path."""
    return any(
        all(fnmatchcase(part, wanted) for part, wanted in zip(parts[start:], pattern, strict=False))
        for start in range(len(parts) - len(pattern) + 1)
    )


def fits(layer: nn.Linear) -> bool:
    return layer.in_features % SIDE == 0 and layer.out_features % SIDE == 0


def putting(model: nn.Module, held: EightBits, device: torch.device) -> Put:
    def put(name: str, weight: Tensor) -> None:
        path = name.removesuffix(_WEIGHT)
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(path, _in_eight_bits(weight.to(device), linear.bias, held), strict=True)

    return put


def _in_eight_bits(weight: Tensor, bias: nn.Parameter | None, held: EightBits) -> EightBitLinear:
    return Int8Linear(weight, bias) if held.kind == "int8" else Fp8Linear(weight, bias, held.layouts)


def read(weights: Weights, wanted: Mapping[str, Tensor], device: torch.device, put: Put, progress: Progress) -> None:
    """Weights whose names and shapes have been checked, each in the precision of its file, and rounded once."""
    for names in groups({name: weights.entries[name].size for name in wanted}):
        entries = {name: weights.entries[name] for name in names}
        held = {
            name: torch.empty(entry.shape, dtype=_precision(entry.dtype), device=device)
            for name, entry in entries.items()
        }
        load_into(replace(weights, entries=entries), held, progress=progress)
        for name in names:
            put(name, held.pop(name))


def _precision(name: str) -> torch.dtype:
    dtype = TORCH_DTYPES[name]
    return dtype if dtype.itemsize > 1 else torch.bfloat16


def readable(weights: Weights, name: str, wanted: Tensor) -> bool:
    """Whether the file has that weight, in that shape and as numbers."""
    entry = weights.entries.get(name)
    if entry is None or entry.shape != tuple(wanted.shape) or entry.dtype not in TORCH_DTYPES:
        return False
    return TORCH_DTYPES[entry.dtype].is_floating_point


def groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
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
    """What became of the layers: for a run's list of decisions."""
    layers = [layer for _, layer in listed(model, patterns)]
    int8 = sum(isinstance(layer, Int8Linear) for layer in layers)
    if int8:
        rest = f"; {len(layers) - int8} stay as they are: two layers share them" if len(layers) > int8 else ""
        return f"base weights: int8 for {int8:,} layers (a scale for each row), multiplied in 16 bits{rest}"
    held = [layer for layer in layers if isinstance(layer, Fp8Linear)]
    both = sum(layer.fp8_turned is not None for layer in held)
    layouts = "in both layouts: nothing is turned in a step" if both else "in one layout, turned in the backward pass"
    left = len(layers) - len(held)
    rest = (
        f"; {left} stay as they are: their sides are no multiples of {SIDE}, or two layers share them" if left else ""
    )
    return f"base weights: fp8 for {len(held):,} layers (e4m3, a scale for each row), {layouts}{rest}"
