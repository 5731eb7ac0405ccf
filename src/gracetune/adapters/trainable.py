"""What is trained: which matrices and convolutions, what an adapter adds to each, and what an optimizer keeps. Pure.

The shapes are those of peft (lora, dora) and lycoris-lora (the others); tests build both libraries' modules and
compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

from pydantic import ValidationError

from gracetune.config.run_config import Adapter, Optimizer
from gracetune.errors import ConfigError, Problem
from gracetune.models.footprint import Block, Footprint, Linear

Dimensions = tuple[int, ...]


@dataclass(frozen=True)
class Tensors:
    """Equal trainable tensors."""

    shape: Dimensions
    count: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.count


@dataclass(frozen=True)
class Target:
    """One kind of matrix that is trained or carries an adapter, with the options that hold for it."""

    block: Block
    linear: Linear
    adapter: Adapter

    def tensors(self) -> Iterator[Tensors]:
        for shape in _SHAPES[self.adapter.kind](self.linear, self.adapter):
            yield Tensors(shape, self.block.count)


@dataclass(frozen=True)
class Selection:
    """The targets of one denoiser; `unmatched` are patterns that select nothing this footprint knows."""

    targets: tuple[Target, ...]
    unmatched: tuple[str, ...] = ()


def select(footprint: Footprint, adapter: Adapter) -> Selection:
    """Apply `adapter.targets`, `exclude` and `by_module`. Without targets a full fine-tune selects every matrix."""
    targets = tuple(
        Target(block, linear, _options(adapter, linear))
        for block in footprint.blocks
        for linear in block.linears
        if _wanted(block, linear, adapter)
    )
    pairs = [(block, linear) for block in footprint.blocks for linear in block.linears]
    unmatched = tuple(
        pattern for pattern in adapter.targets if not any(matches(pattern, block, linear) for block, linear in pairs)
    )
    return Selection(targets, unmatched)


def _wanted(block: Block, linear: Linear, adapter: Adapter) -> bool:
    if any(matches(pattern, block, linear) for pattern in adapter.exclude):
        return False
    if adapter.targets:
        return any(matches(pattern, block, linear) for pattern in adapter.targets)
    asked = linear.default or (linear.conv_default and adapter.conv_rank is not None)
    return asked or adapter.kind == "full_finetune"


def unused_conv_options(adapter: Adapter) -> tuple[str, ...]:
    """What to tell about an adapter without a convolution of more than one pixel."""
    options = {"adapter.conv_rank": adapter.conv_rank, "adapter.conv_alpha": adapter.conv_alpha}
    given = [name for name, value in options.items() if value is not None]
    if not given:
        return ()
    why = "adapter.targets names no convolution" if adapter.targets else "no convolution is among the adapted layers"
    return (f"{' and '.join(given)}: no effect, because {why}",)


def matches(pattern: str, block: Block, linear: Linear) -> bool:
    """A module class, or a run of dotted name parts, as `attn1`, `to_out.0` or `blocks.*.ffn` are."""
    if linear.owner and fnmatchcase(linear.owner, pattern):
        return True
    wanted, parts = pattern.split("."), f"{block.name}.{linear.name}".split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatchcase, parts[start:], wanted)) for start in starts)


_KINDS = {"lora": "lora", "locon": "locon", "loha": "loha", "lokr": "lokr", "full": "full_delta", "ia3": "ia3",
          "diag-oft": "diag_oft"}  # fmt: skip
_FIELDS = {"dim": "rank", "linear_dim": "rank", "factor": "factor", "full_matrix": "full_rank",
           "decompose_both": "decompose_both"}  # fmt: skip


def _options(adapter: Adapter, linear: Linear) -> Adapter:
    own: Mapping[str, Any] = adapter.by_module.get(linear.owner, {})
    changes: dict[str, Any] = {"rank": adapter.conv_rank} if linear.is_spatial and adapter.conv_rank else {}
    changes |= {field: own[name] for name, field in _FIELDS.items() if name in own}
    if str(own.get("algo")) in _KINDS:
        changes["kind"] = _KINDS[own["algo"]]
    try:
        return Adapter.model_validate(adapter.model_dump() | changes) if changes else adapter
    except ValidationError as error:
        key = f"adapter.by_module.{linear.owner}"
        raise ConfigError(
            [Problem(f"{key} ({fault['loc'][0]})", str(fault["input"]), fault["msg"], "correct it")
             for fault in error.errors()]
        ) from error  # fmt: skip


def factorization(dimension: int, factor: int) -> tuple[int, int]:
    """LyCORIS' split of a dimension into two factors, the smaller first: the most even one up to `factor`."""
    if factor > 0 and dimension % factor == 0:
        return min(factor, dimension // factor), max(factor, dimension // factor)
    limit = factor if factor > 0 else dimension
    divisors = [small for small in range(1, math.isqrt(dimension) + 1) if dimension % small == 0 and small <= limit]
    small = divisors[-1]
    return small, dimension // small


def _lora(linear: Linear, adapter: Adapter) -> list[Dimensions]:
    ones = (1,) * len(linear.kernel)
    return [(adapter.rank, linear.inputs, *linear.kernel), (linear.outputs, adapter.rank, *ones)]


def _dora(linear: Linear, adapter: Adapter) -> list[Dimensions]:
    return [*_lora(linear, adapter), (linear.outputs,)]


def _loha(linear: Linear, adapter: Adapter) -> list[Dimensions]:
    across = linear.inputs * math.prod(linear.kernel)
    pair: list[Dimensions] = [(linear.outputs, adapter.rank), (adapter.rank, across)]
    return 2 * pair


class LokrOptions(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def factor(self) -> int: ...

    @property
    def full_rank(self) -> bool: ...

    @property
    def decompose_both(self) -> bool: ...


@dataclass(frozen=True)
class Kronecker:
    """LoKr on one matrix: W1 [a, c] and W2 [b, d], each whole or a product of two of the rank's width."""

    first: tuple[int, int]
    second: tuple[int, int]
    rank: int
    first_apart: bool
    second_apart: bool


def kronecker(inputs: int, outputs: int, options: LokrOptions) -> Kronecker:
    rank = options.rank
    small_in, large_in = factorization(inputs, options.factor)
    small_out, large_out = factorization(outputs, options.factor)
    return Kronecker(
        first=(small_out, small_in),
        second=(large_out, large_in),
        rank=rank,
        first_apart=options.decompose_both and rank < max(small_out, small_in) / 2 and not options.full_rank,
        second_apart=rank < max(large_out, large_in) / 2 and not options.full_rank,
    )


def _lokr(linear: Linear, adapter: Adapter) -> list[Dimensions]:
    split = kronecker(linear.inputs, linear.outputs, adapter)
    shapes: list[Dimensions] = []
    for (rows, columns), apart, kernel in (
        (split.first, split.first_apart, ()),
        (split.second, split.second_apart, linear.kernel),  # the second factor has the kernel
    ):
        pair: list[Dimensions] = [(rows, split.rank), (split.rank, columns * math.prod(kernel))]
        shapes += pair if apart else [(rows, columns, *kernel)]
    return shapes


def _ia3(linear: Linear, _adapter: Adapter) -> list[Dimensions]:
    return [(1, linear.outputs, *(1 for _ in linear.kernel))] if linear.kernel else [(linear.outputs,)]


def _diag_oft(linear: Linear, adapter: Adapter) -> list[Dimensions]:
    size, blocks = factorization(linear.outputs, adapter.rank)
    return [(blocks, size, size)]


def _whole(linear: Linear, _adapter: Adapter) -> list[Dimensions]:
    bias: list[Dimensions] = [(linear.outputs,)] if linear.bias else []
    return [(linear.outputs, linear.inputs, *linear.kernel), *bias]


_SHAPES: Mapping[str, Callable[[Linear, Adapter], list[Dimensions]]] = {
    "lora": _lora,
    "dora": _dora,
    "locon": _lora,
    "loha": _loha,
    "lokr": _lokr,
    "ia3": _ia3,
    "diag_oft": _diag_oft,
    "full_delta": _whole,
    "full_finetune": _whole,
}


def trainable(footprint: Footprint, selection: Selection, adapter: Adapter) -> tuple[Tensors, ...]:
    """Every trained tensor of one denoiser."""
    tensors = [tensor for target in selection.targets for tensor in target.tensors()]
    if adapter.kind == "full_finetune" and not adapter.targets:
        # Biases, norms and embeddings: too small to be worth their shapes.
        every = select(footprint, Adapter(kind="full_finetune")).targets
        rest = footprint.parameters - sum(tensor.elements for target in every for tensor in target.tensors())
        tensors.append(Tensors((rest,), 1))
    return tuple(tensors)


@dataclass(frozen=True)
class StateSize:
    """Bytes an optimizer keeps, and the sentence that says of what."""

    bytes: int
    why: str


def optimizer_state(tensors: tuple[Tensors, ...], optimizer: Optimizer) -> StateSize:
    return _STATES[optimizer.name](tensors, optimizer.options)


def _prodigy(tensors: tuple[Tensors, ...], options: Mapping[str, Any]) -> StateSize:
    every = _slice(options, 1)
    total = 8 * _elements(tensors) + 8 * math.ceil(_elements(tensors) / every)
    return StateSize(total, f"two fp32 moments, start and distance of {_nth(every)}")


def _slice(options: Mapping[str, Any], default: int) -> int:
    value = options.get("slice_p", default)
    return value if isinstance(value, int) and value > 0 else default


def _nth(every: int) -> str:
    return "each" if every == 1 else f"one in {every}"


def _per_element(count: int, what: str) -> Callable[[tuple[Tensors, ...], Mapping[str, Any]], StateSize]:
    def state(tensors: tuple[Tensors, ...], _options: Mapping[str, Any]) -> StateSize:
        return StateSize(4 * count * _elements(tensors), what)

    return state


def _elements(tensors: tuple[Tensors, ...]) -> int:
    return sum(tensor.elements for tensor in tensors)


def _factored(tensors: tuple[Tensors, ...]) -> int:
    """Second moments kept as one row and one column of each matrix, in fp32; vectors keep them whole."""
    total = 0
    for tensor in tensors:
        if len(tensor.shape) < 2:
            total += 4 * tensor.elements
        else:
            *batch, rows, columns = tensor.shape
            total += 4 * math.prod(batch) * (rows + columns) * tensor.count
    return total


_SMALLEST_8BIT = 4096
_BLOCK_8BIT = 256


def _adamw_8bit(tensors: tuple[Tensors, ...], _options: Mapping[str, Any]) -> StateSize:
    total = 0
    for tensor in tensors:
        size = math.prod(tensor.shape)
        if size < _SMALLEST_8BIT:
            total += 8 * tensor.elements
        else:
            total += 2 * (size + 4 * math.ceil(size / _BLOCK_8BIT)) * tensor.count
    return StateSize(total, "two moments of a byte, a scale per 256 (small tensors: fp32)")


def _adafactor(tensors: tuple[Tensors, ...], options: Mapping[str, Any]) -> StateSize:
    momentum = 4 * _elements(tensors) if options.get("beta1") is not None else 0
    what = "one fp32 row and column per matrix" + (" and an fp32 momentum" if momentum else "")
    return StateSize(_factored(tensors) + momentum, what)


def _automagic(tensors: tuple[Tensors, ...], _options: Mapping[str, Any]) -> StateSize:
    per_element = 3 * _elements(tensors)
    what = "16-bit rate and sign per element, second moment factored"
    return StateSize(_factored(tensors) + per_element, what)


def _prodigy_plus(tensors: tuple[Tensors, ...], options: Mapping[str, Any]) -> StateSize:
    every = _slice(options, 11)
    second = _factored(tensors) if options.get("factored", True) else 4 * _elements(tensors)
    total = 4 * _elements(tensors) + second + 8 * math.ceil(_elements(tensors) / every)
    return StateSize(total, f"z in fp32, second moment, start and distance of {_nth(every)}")


_STATES: Mapping[str, Callable[[tuple[Tensors, ...], Mapping[str, Any]], StateSize]] = {
    "adamw": _per_element(2, "two fp32 moments"),
    "adamw_8bit": _adamw_8bit,
    "adafactor": _adafactor,
    "lion": _per_element(1, "one fp32 momentum"),
    "prodigy": _prodigy,
    "prodigy_plus_schedule_free": _prodigy_plus,
    "automagic": _automagic,
}
