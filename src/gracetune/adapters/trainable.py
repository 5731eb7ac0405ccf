"""The trainable tensors of a run, computed from a footprint without building a model. Pure.

`targets.choose` selects the layers, and the algorithms' records give the shapes of their tensors. Tests compare the
result with the modules of peft and lycoris-lora.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gracetune.adapters.algorithms.record import Algorithm, Dimensions
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.computation import Computation
from gracetune.adapters.options import FIELDS
from gracetune.adapters.targets import ModuleInfo, choose, options_for
from gracetune.config.registry import FULL_FINETUNE, kind_of_algo
from gracetune.config.run_config import Adapter
from gracetune.errors import ConfigError, Problem
from gracetune.models.footprint import Footprint, FootprintBlock, FootprintLinear


@dataclass(frozen=True)
class Tensors:
    """Sizes of `count` trainable tensors that have the same shape. It holds no values."""

    shape: Dimensions
    count: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.count


@dataclass(frozen=True)
class TargetLayers:
    """One matrix or convolution of a repeated block, in all blocks where it is trained or adapted, with its options."""

    block: FootprintBlock
    linear: FootprintLinear
    adapter: Adapter
    count: int
    """The number of blocks in which it is selected."""

    @property
    def record(self) -> Algorithm:
        """A full fine-tune is counted like `full_delta`: it trains the weight and the bias."""
        return algorithm("full_delta" if self.adapter.is_full_finetune else self.adapter.kind)

    def tensors(self) -> Iterator[Tensors]:
        for shape in self.record.shapes(self.linear, self.adapter).values():
            yield Tensors(shape, self.count)

    def computation(self) -> Computation:
        return self.record.on(self.linear, self.adapter)

    def reference(self, why: str) -> Computation:
        return self.record.reference(self.linear.outputs, self.adapter, why)


@dataclass(frozen=True)
class TrainableSelection:
    """The targets of one denoiser. `unmatched` are patterns that match nothing in the footprint."""

    targets: tuple[TargetLayers, ...]
    unmatched: tuple[str, ...] = ()


def select(footprint: Footprint, adapter: Adapter) -> TrainableSelection:
    """Apply `adapter.targets`, `exclude`, `within` and `by_module` to a footprint. A full fine-tune without targets
    selects every matrix and convolution."""
    pairs = [(block, linear) for block in footprint.blocks for linear in block.linears]
    within = () if adapter.is_full_finetune else adapter.within
    if not adapter.targets and not within and not adapter.is_full_finetune:
        pairs = [(block, linear) for block, linear in pairs if _is_default(linear, adapter)]
    layers = [(path, _module(linear), number) for number, (block, linear) in enumerate(pairs)
              for path in _paths(block, linear)]  # fmt: skip
    choice = choose(
        [(path, info) for path, info, _number in layers], adapter.targets or ("*",), adapter.exclude,
        within=within, include_spatial=takes_convolutions(adapter),
    )  # fmt: skip
    counts = Counter(layers[index][2] for index in choice.taken)
    present = {name for _path, info, _number in layers for name in info.classes}
    targets = tuple(
        TargetLayers(
            block, linear, _options(adapter, _module(linear), linear, present),
            counts[number] * block.count // len(_paths(block, linear)),
        )
        for number, (block, linear) in enumerate(pairs)
        if counts[number]
    )  # fmt: skip
    return TrainableSelection(targets, (*choice.unmatched_within, *(choice.unmatched if adapter.targets else ())))


def takes_convolutions(adapter: Adapter) -> bool:
    """Whether targets include convolutions with kernels of more than one pixel."""
    return not adapter.within or adapter.conv_rank is not None or adapter.is_full_finetune


def _paths(block: FootprintBlock, linear: FootprintLinear) -> list[str]:
    """The layer's path in each block, or a single one if the footprint does not number the blocks."""
    if block.name.endswith(".*") and "*" not in block.name[:-1]:
        return [f"{block.name[:-1]}{number}.{linear.name}" for number in range(block.count)]
    return [f"{block.name}.{linear.name}"]


def _is_default(linear: FootprintLinear, adapter: Adapter) -> bool:
    return linear.default or (linear.conv_default and adapter.conv_rank is not None)


def _module(linear: FootprintLinear) -> ModuleInfo:
    """The module as `targets.choose` expects it. A typed footprint knows only the layer's direct owner."""
    owners = (linear.owner, *linear.around) if linear.owner else ()
    if linear.kernel:
        return ModuleInfo(f"Conv{len(linear.kernel)}d", "conv", owners, linear.is_spatial)
    return ModuleInfo("Linear", "linear", owners)


def unused_conv_options(adapter: Adapter) -> tuple[str, ...]:
    """Notes on `conv_rank` and `conv_alpha`, which have no effect without convolutions of more than one pixel."""
    options = {"adapter.conv_rank": adapter.conv_rank, "adapter.conv_alpha": adapter.conv_alpha}
    given = [name for name, value in options.items() if value is not None]
    if not given:
        return ()
    why = (
        "adapter.targets names no convolution"
        if adapter.targets and not adapter.within
        else "no convolution is among the adapted layers"
    )
    return (f"{' and '.join(given)}: no effect, because {why}",)


_SIZE_OPTIONS = ("rank", "factor", "full_rank", "decompose_both")
"""The options of a layer that its tensors' shapes depend on."""


def _options(adapter: Adapter, info: ModuleInfo, linear: FootprintLinear, present: Collection[str]) -> Adapter:
    """The adapter's options for one layer: `by_module` overrides `conv_rank`, which overrides `rank`."""
    entry = options_for(info, adapter.by_module, present)
    own: Mapping[str, Any] = {} if entry is None else adapter.by_module[entry]
    changes: dict[str, Any] = {"rank": adapter.conv_rank} if linear.is_spatial and adapter.conv_rank else {}
    changes |= {field: own[name] for name, field in FIELDS.items() if name in own and field in _SIZE_OPTIONS}
    kind = kind_of_algo(own.get("algo"))
    if kind is not None:
        changes["kind"] = kind
    try:
        return Adapter.model_validate(adapter.model_dump() | changes) if changes else adapter
    except ValidationError as error:
        key = f"adapter.by_module.{entry}"
        raise ConfigError(
            [Problem(f"{key} ({fault['loc'][0]})", str(fault["input"]), fault["msg"], "correct it")
             for fault in error.errors()]
        ) from error  # fmt: skip


def trainable(footprint: Footprint, selection: TrainableSelection, adapter: Adapter) -> tuple[Tensors, ...]:
    """Every trained tensor of one denoiser."""
    tensors = [tensor for target in selection.targets for tensor in target.tensors()]
    if adapter.is_full_finetune and not adapter.targets:
        # Norms, embeddings and what else is outside the footprint's layers: it has no shapes for them, so they count as
        # one tensor.
        every = select(footprint, Adapter(kind=FULL_FINETUNE)).targets
        rest = footprint.parameters - sum(tensor.elements for target in every for tensor in target.tensors())
        tensors.append(Tensors((rest,), 1))
    return tuple(tensors)
