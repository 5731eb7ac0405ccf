"""Activation memory: what a training step keeps from its forward to its backward pass. Pure functions.

`FootprintBlock.kept` lists the tensors that autograd saves in one block, counted on the real model classes (tests count
them again on the meta device). What an adapter adds depends on how it is computed:

- `auto`: our own layers (`adapters.fast`). The input of trained matrices is kept once, however many of them read it,
  and each adds little more than tensors of the rank's width. Adapter kinds without a fast form count as `reference`.
- `reference`, lora and dora: peft casts the input of every matrix to the adapter's fp32 and autocast casts it back, so
  each matrix keeps its own copy. torch.compile merges copies of the same tensor.
- `reference`, everything else: the whole change of the weight is built and kept for the gradient of the input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from gracetune.adapters.computation import AdapterPath, Computation
from gracetune.adapters.trainable import TargetLayers, TrainableSelection
from gracetune.config.token_routes import Route
from gracetune.models.footprint import (
    UNPARKED_INPUTS,
    Footprint,
    FootprintBlock,
    FootprintKept,
    FootprintStream,
    Tokens,
)

RecomputePolicy = Literal["off", "half", "quarter", "tenth", "full"]
"""How many activations are kept for the backward pass; the others are recomputed. `off` keeps everything. `full` keeps
only the blocks' inputs. In between, torch.compile keeps the tensors that take longest to compute per byte: at `tenth`
about the blocks' inputs and the attention of the image tokens."""
KEPT_SHARES: Mapping[RecomputePolicy, Fraction] = {
    "off": Fraction(1), "half": Fraction(1, 2), "quarter": Fraction(1, 4), "tenth": Fraction(1, 10)
}  # fmt: skip
"""The share of all activations that each compiler policy keeps. `full` does not use the compiler's budget."""
BUDGETS: Mapping[RecomputePolicy, Fraction] = {**KEPT_SHARES, "half": Fraction(9, 20)}
"""torch.compile's `activation_memory_budget` for each policy. The compiler chooses among few, large tensors: on an
H200, 0.5 kept 57 % of a Wan block and recomputed no matrix product, and 0.45 kept 42 %. Other families were not
measured."""


@dataclass(frozen=True)
class StepMethod:
    """How a training step is computed, as far as its activations depend on it."""

    compiled: bool
    adapter_path: AdapterPath
    compute_bytes: int = 2
    """Bytes of an element in the run's precision."""
    full_finetune: bool = False
    one_sample: bool = False
    """Whether every batch has one sample."""

    @property
    def policies(self) -> tuple[RecomputePolicy, ...]:
        """Available policies, from the fastest to the smallest. Partial ones need torch.compile."""
        return (*KEPT_SHARES, "full") if self.compiled else ("off", "full")


@dataclass(frozen=True)
class Activations:
    """Bytes under one policy."""

    policy: RecomputePolicy
    kept: int
    """Per sample, kept from the forward to the backward pass."""
    working: int
    """Per sample, in addition at the peak of the backward pass."""
    rebuilt: int
    """Weights that adapters rebuild, and their gradients. Does not depend on the batch size."""
    parkable: int = 0
    """The part of `kept` that can wait in host memory until the backward pass: inputs of recomputed blocks."""

    def total(self, batch: int, *, parked: bool = False) -> int:
        """For a micro-batch of `batch` samples; with `parked`, without what waits in host memory."""
        return batch * (self.kept + self.working - (self.parkable if parked else 0)) + self.rebuilt


def activations(
    footprint: Footprint,
    tokens: Tokens,
    selection: TrainableSelection,
    method: StepMethod,
    routes: Sequence[Route] = (),
) -> tuple[Activations, ...]:
    """Activations under every policy, from most memory to least. Blocks inside a route see only the tokens it keeps."""
    costs = [
        replace(_cost(block, seen, selection, method), count=count)
        for block, seen, count in _blocks_by_tokens(footprint, tokens, routes)
    ]
    # After the blocks, the last norm and the loss each hold the output in fp32 (8 bytes per element). With routes, the
    # gradient of the tokens that skip blocks is held too.
    ends = (8 + (method.compute_bytes if routes else 0)) * footprint.width * tokens["image"]
    working = max(cost.working for cost in costs) + ends
    return tuple(_activations_under(policy, costs, working, method) for policy in method.policies)


def _blocks_by_tokens(
    footprint: Footprint, tokens: Tokens, routes: Sequence[Route]
) -> Iterator[tuple[FootprintBlock, Tokens, int]]:
    """Each kind of block with the tokens it sees, and how many blocks of that kind see them."""
    first = 0
    for block in footprint.blocks:
        numbers = range(first, first + block.count)
        first += block.count
        plain = block.count
        for route in routes:
            count = len(range(max(route.first, numbers.start), min(route.last + 1, numbers.stop)))
            if count:
                kept = route.kept(tokens["image"])
                yield block, {**tokens, "image": kept, "joint": kept + tokens["text"]}, count
                plain -= count
        if plain:
            yield block, tokens, plain


@dataclass(frozen=True)
class _Cost:
    """Bytes per sample of one block; `count` blocks are equal. `rebuilt` and `gradient` do not grow with the batch."""

    count: int
    kept: int
    enters: int
    """The block's inputs."""
    working: int
    rebuilt: int
    gradient: int
    shares: Mapping[RecomputePolicy, float | None]
    """The share that the compiler keeps under each partial policy; None if it was not traced."""

    def under(self, policy: RecomputePolicy) -> int | None:
        """Bytes that the compiler keeps of one block under its budget for this policy; None if that was not traced."""
        share = self.shares.get(policy)
        return None if share is None else max(self.enters, int(share * (self.kept + self.enters)))

    def recomputed(self, policy: RecomputePolicy) -> int:
        """Bytes of one block that its backward pass computes again, beyond the half that the peak has room for."""
        share = self.shares.get(policy) or 0.0
        return int(max(0.0, 1 - 2 * share) * self.kept)


def _activations_under(policy: RecomputePolicy, costs: list[_Cost], working: int, method: StepMethod) -> Activations:
    enters = sum(cost.count * cost.enters for cost in costs)
    everything = sum(cost.count * cost.kept for cost in costs) + (enters if method.compiled else 0)
    rebuilt = sum(cost.count * cost.rebuilt for cost in costs)
    gradient = max(cost.gradient for cost in costs)
    if policy == "off":
        return Activations(policy, kept=everything, working=working, rebuilt=rebuilt + gradient)
    # Interpolate between `half` and `full`. At `half` the measured peaks show no recomputed tensors.
    fraction = 1 - 2 * KEPT_SHARES.get(policy, Fraction(0))
    kept = _between(max(enters, everything // 2), enters, fraction)
    recomputed = max(int(fraction * cost.kept) for cost in costs)
    traced = [cost.count * size for cost in costs if (size := cost.under(policy)) is not None]
    if len(traced) == len(costs):
        kept, recomputed = sum(traced), max(cost.recomputed(policy) for cost in costs)
    rebuilt = _between(rebuilt // 2, max(cost.rebuilt for cost in costs), fraction)
    # Besides the inputs that stay on the GPU, one is being copied out and one is being copied back.
    staying = (UNPARKED_INPUTS + 2) * max(cost.enters for cost in costs)
    parkable = max(0, enters - staying) if policy == "full" else 0
    return Activations(policy, kept=kept, working=working + recomputed, rebuilt=rebuilt + gradient, parkable=parkable)


def _between(first: int, last: int, fraction: Fraction) -> int:
    return int(first + fraction * (last - first))


def _cost(block: FootprintBlock, tokens: Tokens, selection: TrainableSelection, method: StepMethod) -> _Cost:
    targets = [target for target in selection.targets if target.block is block]
    trained = bool(targets) or method.full_finetune
    enters = (entry for entry in block.enters if trained or entry.needed_by != "block")
    return _Cost(
        count=block.count,
        kept=_kept(block, tokens, targets, method) + _added(block, tokens, targets, method),
        enters=_bytes(enters, block, tokens, method),
        working=_bytes(block.working, block, tokens, method) + _scaling(block, tokens, targets, method),
        rebuilt=method.compute_bytes * sum(_constant(target, method) for target in targets),
        gradient=max((_weight_gradient(target, method) for target in targets), default=0),
        shares={policy: block.share_under(float(budget), tokens["image"]) for policy, budget in BUDGETS.items()},
    )


def _constant(target: TargetLayers, method: StepMethod) -> int:
    """Elements that the adapter of one matrix keeps for any batch size, besides its tensors and casts of them."""
    linear, computation = target.linear, _computation(target, method)
    if computation.rebuilds_weight:
        return linear.weights if linear.backward else 0
    return computation.compiled_constant if method.compiled else 0


def _weight_gradient(target: TargetLayers, method: StepMethod) -> int:
    """Bytes of weight-sized tensors alive at once while the gradient goes back to the adapter's factors."""
    return _computation(target, method).backward_bytes * target.linear.weights


def _scaling(block: FootprintBlock, tokens: Tokens, targets: list[TargetLayers], method: StepMethod) -> int:
    """The fp32 copy of the output that DoRA scales. A compiler fuses the scaling and needs no copy."""
    if method.compiled or method.compute_bytes == 4:
        return 0
    scaled = [target.linear for target in targets if _computation(target, method).fp32_output]
    return max((int(4 * linear.outputs * _tokens(linear.stream, block, tokens)) for linear in scaled), default=0)


def _computation(target: TargetLayers, method: StepMethod) -> Computation:
    if method.adapter_path == "auto":
        return target.computation()
    return target.reference("requested")


def casts_tensors(target: TargetLayers, method: StepMethod) -> bool:
    """Whether the backward pass keeps copies of the adapter's tensors in the compute precision."""
    return _computation(target, method).casts_tensors


def _copies_input(target: TargetLayers, method: StepMethod) -> bool:
    """Whether the adapter keeps a cast copy of the matrix's input."""
    return _computation(target, method).copies_input and method.compute_bytes < 4


def _input_copiers(block: FootprintBlock, targets: list[TargetLayers], method: StepMethod) -> list[TargetLayers]:
    """The matrices that keep a copy of their input. With torch.compile, one per input that the graph keeps."""
    casting = [target for target in targets if _copies_input(target, method)]
    if not method.compiled:
        return casting
    kept = {entry.name for entry in block.kept if entry.needed_by == "graph"}
    return list({target.linear.reads: target for target in casting if target.linear.reads in kept}.values())


def _kept(block: FootprintBlock, tokens: Tokens, targets: list[TargetLayers], method: StepMethod) -> int:
    """Bytes of the entries of `block.kept` that these targets and this method keep alive."""
    read = {target.linear.reads for target in targets if method.compiled or not _copies_input(target, method)}
    scaled = {target.linear.scales for target in targets}

    def is_kept(kept: FootprintKept) -> bool:
        if not (kept.compiled if method.compiled else kept.eager) or (kept.batches_only and method.one_sample):
            return False
        if kept.needed_by == "weights":
            return kept.name in read
        if kept.needed_by == "block" and targets:
            return True
        if kept.needed_by == "scales" and kept.stream in scaled:
            return True
        return kept.needed_by == "graph" or method.full_finetune

    return _bytes(filter(is_kept, block.kept), block, tokens, method)


def _added(block: FootprintBlock, tokens: Tokens, targets: list[TargetLayers], method: StepMethod) -> int:
    """Bytes that the adapters of the block's matrices add."""
    total = 0
    copiers = _input_copiers(block, targets, method)
    for target in targets:
        linear, elements = target.linear, 0
        if target in copiers:
            elements += linear.inputs
        elements += _computation(target, method).kept
        total += int(elements * _tokens(linear.stream, block, tokens))
    return total * method.compute_bytes


def _bytes(kept: Iterable[FootprintKept], block: FootprintBlock, tokens: Tokens, method: StepMethod) -> int:
    return int(
        sum(
            _tokens(entry.stream, block, tokens) * entry.width * (4 if entry.fp32 else method.compute_bytes)
            for entry in kept
        )
    )


def _tokens(stream: FootprintStream, block: FootprintBlock, tokens: Tokens) -> Fraction:
    """Tokens of a stream in this block; some U-Net blocks see only a share of the image tokens."""
    if stream == "sample":
        return Fraction(1)
    return tokens[stream] * (block.tokens if stream == "image" else Fraction(1))
