"""Footprint blocks from the real denoiser: its blocks run on the meta device, and torch's partitioner splits them.

Every block of a kind keeps the same, so one of each is traced. A tensor has one row for each token of a stream, for
each token of both or for the sample; the traced numbers of tokens share no large factors, so the size of a tensor shows
which. A second trace with other numbers verifies this: both must have the same rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import nn

from gracetune.models.footprint import (
    BudgetShare,
    FootprintBlock,
    FootprintKept,
    FootprintLinear,
    FootprintStream,
    NeededBy,
)
from gracetune.models.footprint_tables import TracedTable
from gracetune.models.registry import ExampleInputs
from gracetune.planning.activations import BUDGETS as POLICY_BUDGETS
from gracetune.planning.tracing.calls import BlockCall, BlockKind, TensorArgument, block_calls, block_kinds
from gracetune.planning.tracing.compiled import CompiledRun, run_compiled
from gracetune.planning.tracing.eager import EagerRun, backward_peak, run_eager
from gracetune.planning.tracing.operators import TracedDevice

BATCH = 2
"""Samples of the traced batch. With one sample, PyTorch shares some tensors that it copies for larger batches."""
BUDGETS = tuple(float(budget) for budget in POLICY_BUDGETS.values() if budget < 1)
"""The traced values of torch.compile's `activation_memory_budget`."""
_FEW_ROWS = 16
"""A tensor with at most as many rows per sample has them for the sample, not for tokens."""
Sizes = Counter[tuple[int, int]]
"""(bytes, bytes per element) of tensors, with their number."""


@dataclass(frozen=True)
class TokenCounts:
    """The numbers of tokens of a traced sample: an image of rows x columns, and a caption."""

    rows: int
    columns: int
    text: int

    @property
    def image(self) -> int:
        return self.rows * self.columns


TRACED = TokenCounts(68, 76, 509)
VERIFIED = TokenCounts(52, 92, 251)
SMALL = TokenCounts(32, 32, 509)
"""An image of 512x512 pixels in most models; for budgets."""
CLIP = TokenCounts(168, 200, 509)
"""About a clip of 81 frames of 832x480, for models of clips."""


def _padded(multiple: int, counts: TokenCounts, primes: tuple[int, int, int]) -> TokenCounts:
    """Token counts for a denoiser that pads to a multiple: multiples of it, so that it adds none.

    As different as `TRACED` and `VERIFIED`: their quotients and the sum of them share no large factor.
    """
    if multiple == 1:
        return counts
    rows, columns, text = primes
    return TokenCounts(rows * multiple, columns, text * multiple)


class TraceError(ValueError):
    """A block that keeps something else than this module can express."""


def trace(
    model: nn.Module, classes: Collection[str], default_targets: Collection[str], inputs: ExampleInputs,
    *, text: int | None = None, multiple: int = 1, clips: bool = False, device: TracedDevice = "cuda",
    compiled: bool = True, dtype: torch.dtype = torch.bfloat16,
) -> TracedTable:  # fmt: skip
    """Trace a denoiser on the meta device.

    `classes` are the class names of its repeated blocks, `default_targets` the paths of the layers an adapter is
    attached to by default. `text` fixes the caption's tokens for models that accept no other number. `multiple`: the
    model pads its tokens to multiples of this number. With `clips`, budgets are traced at the size of a clip too.
    """
    nn.Module.to(model, dtype)  # not diffusers' method, which warns of layers that weights files keep in fp32
    model.train()
    sizes = [_padded(multiple, TRACED, (7, 23, 17)), _padded(multiple, VERIFIED, (11, 13, 23))]
    if compiled:
        sizes += [
            replace(one, text=-(-one.text // multiple) * multiple) for one in ([SMALL, CLIP] if clips else [SMALL])
        ]
    counts = [replace(one, text=text) if text else one for one in sizes]
    given = [_given(model, inputs, one) for one in counts]
    alone = _given(model, inputs, counts[0], batch=1)
    kinds = block_kinds(model, classes, given[0], device)
    if not kinds:
        raise TraceError(f"{type(model).__name__}: no blocks of the classes {', '.join(classes)}")
    calls = [block_calls(model, kinds, default_targets, one, device) for one in given]
    calls_alone = block_calls(model, kinds, default_targets, alone, device)
    blocks = []
    for kind in kinds:
        block = model.get_submodule(kind.second)
        prefix = f"{kind.second}."
        default = frozenset(path.removeprefix(prefix) for path in default_targets if path.startswith(prefix))
        own, single = [made[kind.second] for made in calls], calls_alone[kind.second]
        reached = own[0].gets_gradient
        if not reached:
            own, single = [call.with_gradient() for call in own], single.with_gradient()
        first, second, *others = (
            _TracedKind(model, kind, block, call, single, one, default, device, compiled)
            for call, one in zip(own, counts, strict=True)
        )
        first.verify(second)
        shares = [share for traced in (first, *others) for share in traced.shares()] if compiled else []
        traced_block = first.block if reached else _if_trained(first.block)
        blocks.append(replace(traced_block, budgets=tuple(shares)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    width = next((entry.width for entry in blocks[0].enters if entry.stream in ("image", "joint")), None)
    if width is None:
        raise TraceError(f"{blocks[0].name}: no argument has a row for each token of the image")
    return TracedTable(parameters, width, tuple(blocks))


def _if_trained(block: FootprintBlock) -> FootprintBlock:
    """A block before the trained layers: no gradient reaches it, and nothing is saved, unless it is trained itself."""

    def needed(kept: tuple[FootprintKept, ...]) -> tuple[FootprintKept, ...]:
        return tuple(replace(one, needed_by="block") if one.needed_by == "graph" else one for one in kept)

    return replace(block, kept=needed(block.kept), enters=needed(block.enters))


def _given(model: nn.Module, inputs: ExampleInputs, counts: TokenCounts, *, batch: int = BATCH) -> Mapping[str, Any]:
    """The denoiser's arguments on the meta device, in the precision of its weights."""
    dtype = next(model.parameters()).dtype
    with torch.device("meta"):
        given = inputs(model, batch=batch, rows=counts.rows, columns=counts.columns, text=counts.text)
    converted: Mapping[str, Any] = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, given
    )
    return converted


@dataclass(frozen=True)
class _Group:
    """Linear layers that read the same tensor, and what is saved additionally if they are trained."""

    linears: tuple[str, ...]
    extra: Sizes
    is_kept: bool
    """Whether their input is saved even if nothing is trained."""

    @property
    def name(self) -> str:
        return f"input of {self.linears[0]}"


@dataclass(frozen=True)
class _TracedKind:
    """The traces of one kind of block at one size."""

    model: nn.Module
    kind: BlockKind
    module: nn.Module
    call: BlockCall
    alone: BlockCall
    """The same call with one sample."""
    counts: TokenCounts
    default: frozenset[str]
    device: TracedDevice
    compiled: bool

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _run(self, trained: Collection[str] | None) -> EagerRun:
        return run_eager(self.module, self.call, trained, self.device)

    @cached_property
    def frozen(self) -> EagerRun:
        return self._run(())

    @cached_property
    def adapted(self) -> EagerRun:
        return self._run(self.default)

    @cached_property
    def _kept(self) -> Sizes:
        return _sizes(self.frozen)

    def _extra(self, trained: Collection[str] | None) -> Sizes:
        return _sizes(self._run(trained)) - self._kept

    @cached_property
    def groups(self) -> tuple[_Group, ...]:
        """Of the layers that read tokens."""
        inputs = self.adapted.inputs
        by_tensor: dict[int, list[str]] = {}
        for name, read in inputs.items():
            if self._stream(name) != "sample":
                by_tensor.setdefault(read.storage, []).append(name)
        found: list[_Group] = []
        for names in by_tensor.values():
            own = {name: self._extra([name]) for name in names}
            together = self._extra(names) if len(names) > 1 else own[names[0]]
            kept = self.frozen.inputs[names[0]].storage in self.frozen.saved.bytes_by_storage
            if len(names) > 1 and sum(own.values(), Sizes()) == together:  # each keeps its own, or nothing
                found += [_Group((name,), own[name], kept) for name in names]
            else:
                found.append(_Group(tuple(names), together, kept))
        return tuple(found)

    @cached_property
    def parts_of_others(self) -> Mapping[bool, frozenset[str]]:
        """Compiled or not -> groups whose input is a part of another saved tensor if the batch has one sample."""
        frozen = run_eager(self.module, self.alone, (), self.device).saved.total
        eager, compiled = set[str](), set[str]()
        for group in self.groups:
            if group.extra and run_eager(self.module, self.alone, group.linears, self.device).saved.total == frozen:
                eager.add(group.name)
        if self.compiled:
            linears = self.adapted.inputs
            one, both = run_compiled(self.module, self.alone, self.default, linears, self.device), self.partitions[1]
            for group in self.groups:
                name = group.linears[0]
                own, read = both.kept.get(both.inputs.get(name, "")), one.kept.get(one.inputs.get(name, ""))
                if own is not None and read is not None and BATCH * read[0] > own[0]:
                    compiled.add(group.name)
        return {False: frozenset(eager), True: frozenset(compiled)}

    @cached_property
    def modulations(self) -> Mapping[str, Sizes]:
        """Layers with one row per sample -> what is saved additionally if they are trained."""
        return {name: self._extra([name]) for name in self.adapted.inputs if self._stream(name) == "sample"}

    @cached_property
    def partitions(self) -> tuple[CompiledRun, CompiledRun]:
        """Compiled, frozen and with the default targets trained."""
        frozen, adapted = (
            run_compiled(self.module, self.call, trained, self.adapted.inputs, self.device)
            for trained in ((), self.default)
        )
        return frozen, adapted

    # -- what the footprint says --------------------------------------------------------------------------------------

    @cached_property
    def block(self) -> FootprintBlock:
        compiled = [*self._compiled_entries()] if self.compiled else []
        return FootprintBlock(
            name=self.kind.name,
            count=len(self.kind.paths),
            kept=(*self._eager_entries(), *compiled),
            enters=tuple(self._entries("residual", Sizes(self.frozen.enters.bytes_by_storage.values()))),
            working=tuple(self._working()),
            linears=tuple(self._linear(name) for name in self.adapted.inputs),
            tokens=self.share,
        )

    def verify(self, other: _TracedKind) -> None:
        """Compare with a trace at another size: the sums of all entries must be what is saved there."""
        for what, mine, theirs in (
            ("nothing", self.frozen, other.frozen), ("the default targets", self.adapted, other.adapted)
        ):  # fmt: skip
            mine_rows, their_rows = (one._rows(_sizes(run)) for one, run in ((self, mine), (other, theirs)))
            expected = sum(self._bytes(rows, width, other.counts) for rows, width in mine_rows.items())
            if expected != theirs.saved.total:
                found = f"{theirs.saved.total:,} bytes, not {expected:,}"
                raise TraceError(f"{self.kind.name} with {what} trained: {found}; {mine_rows} and {their_rows}")

    @cached_property
    def share(self) -> Fraction:
        """Tokens of this block per image token. Below 1 for the lower levels of a U-Net."""
        image, text = self.counts.image, self.counts.text
        known = self._gradient_rows in (image, text, image + text)
        return Fraction(1) if known else Fraction(self._gradient_rows, image)

    @cached_property
    def _gradient_rows(self) -> int:
        """Rows per sample of the first argument that needs a gradient."""
        arguments = (leaf for leaf in self.call.leaves if isinstance(leaf, TensorArgument) and leaf.requires_grad)
        first = next(arguments, None)
        if first is None:
            raise TraceError(f"{self.kind.name}: no argument needs a gradient")
        return math.prod(first.shape[:-1]) // BATCH

    def _bytes(self, rows: tuple[FootprintStream, int], width: int, counts: TokenCounts) -> int:
        stream, element = rows
        image = int(counts.image * self.share)
        tokens = {"image": image, "text": counts.text, "joint": image + counts.text, "sample": 1}[stream]
        return BATCH * tokens * width * element

    def _rows(self, sizes: Sizes) -> Counter[tuple[FootprintStream, int]]:
        """(stream, bytes per element) -> elements per token."""
        found: Counter[tuple[FootprintStream, int]] = Counter()
        for (size, element), number in sizes.items():
            stream, width = self._stream_of(size // (BATCH * element))
            found[stream, element] += number * width
        return found

    def _stream_of(self, elements: int) -> tuple[FootprintStream, int]:
        image, text = int(self.counts.image * self.share), self.counts.text
        tokens: tuple[tuple[FootprintStream, int], ...] = (("joint", image + text), ("image", image), ("text", text))
        for stream, count in tokens:
            if elements % count == 0:
                return stream, elements // count
        return "sample", elements

    def _entries(
        self, name: str, sizes: Sizes, needed_by: NeededBy = "graph", *, eager: bool = True, compiled: bool = True
    ) -> Iterator[FootprintKept]:
        for (stream, element), width in sorted(self._rows(sizes).items()):
            wide, fp32 = (width, True) if element == 4 else (-(-width * element // 2), False)
            yield FootprintKept(name, wide, stream, needed_by, fp32, eager=eager, compiled=compiled)

    def _read(self, group: _Group, sizes: Sizes, *, compiled: bool) -> Iterator[FootprintKept]:
        """What is saved if a trained matrix of a group reads it."""
        shared = group.name in self.parts_of_others[compiled]
        for entry in self._entries(group.name, sizes, "weights", eager=not compiled, compiled=compiled):
            yield replace(entry, batches_only=shared)

    def _eager_entries(self) -> Iterator[FootprintKept]:
        rest = self._kept.copy()
        found: list[FootprintKept] = []
        for group in self.groups:
            if group.is_kept:
                own = Sizes([self.frozen.saved.bytes_by_storage[self.frozen.inputs[group.linears[0]].storage]])
                if not own - rest:
                    rest -= own
                    found += self._entries(group.name, own, compiled=False)
            found += self._read(group, group.extra, compiled=False)
        yield from self._entries("saved by eager autograd", rest, compiled=False)
        yield from found
        scaled = Sizes()
        for name, extra in self.modulations.items():
            scaled += extra
            for entry in self._entries(f"scaled by {name}", extra, "scales"):
                yield (
                    entry if entry.stream != "sample" else replace(entry, name=f"input of {name}", needed_by="weights")
                )
        read = sum((group.extra for group in self.groups), Sizes())
        yield from self._entries("saved if everything is trained", self._extra(None) - read - scaled, "full")

    def _compiled_entries(self) -> Iterator[FootprintKept]:
        frozen, adapted = self.partitions
        inputs = {*frozen.gradient_inputs}  # counted as the block's inputs
        without = Sizes(size for name, size in frozen.kept.items() if name not in inputs)
        with_all = Sizes(size for name, size in adapted.kept.items() if name not in inputs)
        always, rest = without & with_all, with_all - without
        always -= self._instead_of_inputs(always)
        seen: set[str] = set()
        for group in self.groups:
            node = next((adapted.inputs[name] for name in group.linears if name in adapted.inputs), None)
            if node is None or node in seen or node not in adapted.kept:
                continue
            own = Sizes([adapted.kept[node]])
            if not own - rest and group.extra:
                seen.add(node)
                rest -= own
                yield from self._read(group, own, compiled=True)
        yield from self._entries("saved by the compiler", always, eager=False)
        yield from self._entries("saved by the compiler with adapters", rest, "block", eager=False)

    def _instead_of_inputs(self, always: Sizes) -> Sizes:
        """What the compiler keeps instead of the block's inputs, which a plan counts: two streams joined to one."""
        kept = {name for name in self.partitions[1].gradient_inputs if name in self.partitions[1].kept}
        missing = self.frozen.enters.total - sum(self.partitions[1].kept[name][0] for name in kept)
        joined = next((one for one in always if missing and one[0] == missing), None)
        return Sizes() if joined is None else Sizes([joined])

    def shares(self) -> Iterator[BudgetShare]:
        """What the compiler keeps at this size under each budget."""
        linears = self.adapted.inputs
        whole = run_compiled(self.module, self.call, self.default, linears, self.device).total
        for budget in BUDGETS:
            kept = run_compiled(self.module, self.call, self.default, linears, self.device, budget).total
            yield BudgetShare(self.counts.image, budget, round(kept / whole, 4))

    def _working(self) -> Iterator[FootprintKept]:
        """Bytes at the peak of the backward pass, as elements of 16 bits for each token of the larger stream."""
        peak = backward_peak(self.module, self.call, self.device)
        joint = any(entry.stream in ("joint", "text") for entry in self._entries("", _enters(self.frozen)))
        tokens = int(self.counts.image * self.share) + (self.counts.text if joint else 0)
        yield FootprintKept(
            "gradients and temporaries", -(-peak // (2 * BATCH * tokens)), "joint" if joint else "image"
        )

    def _stream(self, linear: str) -> FootprintStream:
        rows = self.adapted.inputs[linear].rows // BATCH
        image, text = int(self.counts.image * self.share), self.counts.text
        named: dict[int, FootprintStream] = {image: "image", text: "text", image + text: "joint"}
        return named.get(rows, "sample" if rows <= _FEW_ROWS else "vision")

    def _linear(self, name: str) -> FootprintLinear:
        module: Any = self.module.get_submodule(name)  # an nn.Linear
        owners = _owners(self.model, f"{self.kind.second}.{name}")
        return FootprintLinear(
            name=name,
            inputs=int(module.in_features),
            outputs=int(module.out_features),
            reads=self._reads(name),
            owner=owners[0],
            stream=self._stream(name),
            bias=module.bias is not None,
            backward=self.frozen.inputs[name].needs_gradient,
            default=name in self.default,
            scales=self._scales(name),
            around=owners[1:],
        )

    def _reads(self, name: str) -> str:
        for group in self.groups:
            if name in group.linears and (group.extra or group.is_kept):
                return group.name
        return f"input of {name}" if name in self.modulations else ""

    def _scales(self, name: str) -> FootprintStream | None:
        streams = {stream for stream, _ in self._rows(self.modulations.get(name, Sizes()))} - {"sample"}
        if len(streams) > 1:
            raise TraceError(f"{self.kind.name}.{name} scales several streams: {', '.join(sorted(streams))}")
        return next(iter(streams), None)


def _sizes(run: EagerRun) -> Sizes:
    return Sizes(run.saved.bytes_by_storage.values())


def _enters(run: EagerRun) -> Sizes:
    return Sizes(run.enters.bytes_by_storage.values())


def _owners(model: nn.Module, path: str) -> tuple[str, ...]:
    """Classes of the modules around a path, the innermost first."""
    parts = path.split(".")[:-1]
    return tuple(type(model.get_submodule(".".join(parts[:length]))).__name__ for length in range(len(parts), -1, -1))
