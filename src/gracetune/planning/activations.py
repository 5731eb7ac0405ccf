"""How much one training step keeps between its forward and its backward pass. Pure.

First principles: `FootprintBlock.kept` lists the tensors autograd saves in one block, counted on the real model classes
(tests do it again on the meta device). What an adapter adds depends on how it is computed:

- `plain`: our own layers (`adapters.computation`). The input of a trained matrix is kept once, however many matrices
  read it, and beside it little more than the rank's width; kinds without such a form are as below.
- `library`, lora and dora: peft casts the input of every matrix to the adapter's fp32 and autocast casts it back, so
  each matrix keeps a copy of its own. Compiled, copies of the same tensor fold into one.
- `library`, everything else: LyCORIS rebuilds the whole weight; each rebuilt matrix is kept for the input's gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from gracetune.adapters.computation import Computation
from gracetune.adapters.trainable import TargetLayers, TrainableSelection
from gracetune.config.token_routes import Route
from gracetune.models.footprint import STAYING, Footprint, FootprintBlock, FootprintKept, FootprintStream, Tokens

Policy = Literal["off", "half", "quarter", "tenth", "full"]
"""`off` keeps everything, `full` the blocks' inputs, and repeats every block's forward. Between them torch.compile
keeps what takes longest to compute for its size: a tenth is the inputs and the image tokens' attention."""
PARTS: Mapping[Policy, Fraction] = {
    "off": Fraction(1), "half": Fraction(1, 2), "quarter": Fraction(1, 4), "tenth": Fraction(1, 10)
}  # fmt: skip
"""Of everything, so much is kept; `full` is not the compiler's doing."""
BUDGETS: Mapping[Policy, Fraction] = {**PARTS, "half": Fraction(9, 20)}
"""The compiler's activation_memory_budget for that. Told a half it keeps 57 % of a Wan block on an H200, and repeats no
product; told 0.45 it keeps 42 %: it chooses among few, large tensors. Other families have not been asked."""


@dataclass(frozen=True)
class Method:
    """How the step is computed."""

    compiled: bool
    adapter_path: Literal["plain", "library"]
    compute_bytes: int = 2
    full_finetune: bool = False

    @property
    def policies(self) -> tuple[Policy, ...]:
        """From the fastest to the smallest. The budget is the compiler's, so it needs one."""
        return (*PARTS, "full") if self.compiled else ("off", "full")


@dataclass(frozen=True)
class Activations:
    """Bytes under one policy: those that grow with the batch, and those that do not."""

    policy: Policy
    kept: int
    """For each sample, from forward to backward."""
    working: int
    """For each sample, alive at the worst moment of the backward pass beside the above."""
    rebuilt: int
    """Rebuilt weights and their gradients; the same for any batch."""
    parkable: int = 0
    """So much of `kept` can wait in host memory until the backward pass: inputs of blocks that are repeated."""

    def total(self, batch: int, *, parked: bool = False) -> int:
        return batch * (self.kept + self.working - (self.parkable if parked else 0)) + self.rebuilt


def activations(
    footprint: Footprint, tokens: Tokens, selection: TrainableSelection, method: Method, routes: Sequence[Route] = ()
) -> tuple[Activations, ...]:
    """One entry per policy, from most memory to least. Blocks in a route see the tokens it keeps."""
    costs = [
        replace(_cost(block, seen, selection, method), count=count)
        for block, seen, count in _seen(footprint, tokens, routes)
    ]
    # The last norm works in fp32 and the loss on top of it, whatever the blocks do. The gradient of tokens that skip
    # blocks waits beside these.
    ends = (8 + (method.compute_bytes if routes else 0)) * footprint.width * tokens["image"]
    working = max(cost.working for cost in costs) + ends
    return tuple(_under(policy, costs, working, method) for policy in method.policies)


def _seen(
    footprint: Footprint, tokens: Tokens, routes: Sequence[Route]
) -> Iterator[tuple[FootprintBlock, Tokens, int]]:
    """The blocks, with the tokens they see and how many blocks of a kind see these."""
    begins = 0
    for block in footprint.blocks:
        numbers = range(begins, begins + block.count)
        begins += block.count
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
    """One kind of block."""

    count: int
    kept: int
    enters: int
    working: int
    rebuilt: int
    gradient: int


def _under(policy: Policy, costs: list[_Cost], working: int, method: Method) -> Activations:
    enters = sum(cost.count * cost.enters for cost in costs)
    everything = sum(cost.count * cost.kept for cost in costs) + (enters if method.compiled else 0)
    rebuilt = sum(cost.count * cost.rebuilt for cost in costs)
    gradient = max(cost.gradient for cost in costs)
    if policy == "off":
        return Activations(policy, everything, working, rebuilt + gradient)
    # From `half`, whose peaks were measured and show nothing of what is repeated, in a line to `full`.
    way = 1 - 2 * PARTS.get(policy, Fraction(0))
    kept = _between(max(enters, everything // 2), enters, way)
    rebuilt = _between(rebuilt // 2, max(cost.rebuilt for cost in costs), way)
    repeated = max(cost.kept for cost in costs)
    # Beside those that stay, one is on its way there and one on its way back.
    staying = (STAYING + 2) * max(cost.enters for cost in costs)
    parkable = max(0, enters - staying) if policy == "full" else 0
    return Activations(policy, kept, working + int(way * repeated), rebuilt + gradient, parkable)


def _between(first: int, last: int, way: Fraction) -> int:
    return int(first + way * (last - first))


def _cost(block: FootprintBlock, tokens: Tokens, selection: TrainableSelection, method: Method) -> _Cost:
    targets = [target for target in selection.targets if target.block is block]
    trained = bool(targets) or method.full_finetune
    enters = (entry for entry in block.enters if trained or entry.needed_by != "block")
    return _Cost(
        count=block.count,
        kept=_kept(block, tokens, targets, method) + _added(block, tokens, targets, method),
        enters=_bytes(enters, block, tokens, method),
        working=_bytes(block.working, block, tokens, method) + _scaling(block, tokens, targets, method),
        rebuilt=method.compute_bytes * sum(_constant(target, method) for target in targets),
        gradient=max((_in_the_backward_pass(target, method) for target in targets), default=0),
    )


def _constant(target: TargetLayers, method: Method) -> int:
    """Elements one matrix' adapter keeps whatever the batch, beside its own tensors and casts of them."""
    linear, way = target.linear, _way(target, method)
    if way.rebuilds_weight:
        return linear.weights if linear.backward else 0
    return way.compiled_constant if method.compiled else 0


def _in_the_backward_pass(target: TargetLayers, method: Method) -> int:
    """Bytes of the weight's size alive at once, until the gradient has reached the factors."""
    return _way(target, method).backward_bytes * target.linear.weights


def _scaling(block: FootprintBlock, tokens: Tokens, targets: list[TargetLayers], method: Method) -> int:
    """DoRA scales the output in fp32, in one pass if a compiler sees to it."""
    if method.compiled or method.compute_bytes == 4:
        return 0
    scaled = [target.linear for target in targets if _way(target, method).fp32_output]
    return max((int(4 * linear.outputs * _tokens(linear.stream, block, tokens)) for linear in scaled), default=0)


def _way(target: TargetLayers, method: Method) -> Computation:
    if method.adapter_path == "plain":
        return target.computation()
    return target.reference("a plan for the libraries' layers")


def casts_tensors(target: TargetLayers, method: Method) -> bool:
    """Whether copies of its tensors in the precision of the computation are kept for the backward pass."""
    return _way(target, method).casts_tensors


def _casts(target: TargetLayers, method: Method) -> bool:
    return _way(target, method).copies_input and method.compute_bytes < 4


def _copying(block: FootprintBlock, targets: list[TargetLayers], method: Method) -> list[TargetLayers]:
    """The matrices that keep a copy of their input. Compiled, only one reader of what is kept for the graph does."""
    casting = [target for target in targets if _casts(target, method)]
    if not method.compiled:
        return casting
    kept = {entry.name for entry in block.kept if entry.needed_by == "graph"}
    return list({target.linear.reads: target for target in casting if target.linear.reads in kept}.values())


def _kept(block: FootprintBlock, tokens: Tokens, targets: list[TargetLayers], method: Method) -> int:
    read = {target.linear.reads for target in targets if method.compiled or not _casts(target, method)}
    scaled = {target.linear.scales for target in targets}

    def counts(kept: FootprintKept) -> bool:
        if not (kept.compiled if method.compiled else kept.eager):
            return False
        if kept.needed_by == "weights":
            return kept.name in read
        if kept.needed_by == "block" and targets:
            return True
        if kept.needed_by == "scales" and kept.stream in scaled:
            return True
        return kept.needed_by == "graph" or method.full_finetune

    return _bytes(filter(counts, block.kept), block, tokens, method)


def _added(block: FootprintBlock, tokens: Tokens, targets: list[TargetLayers], method: Method) -> int:
    """What each adapted matrix keeps for itself, per token of its stream."""
    total = 0
    copying = _copying(block, targets, method)
    for target in targets:
        linear, elements = target.linear, 0
        if target in copying:
            elements += linear.inputs
        elements += _way(target, method).kept
        total += int(elements * _tokens(linear.stream, block, tokens))
    return total * method.compute_bytes


def _bytes(kept: Iterable[FootprintKept], block: FootprintBlock, tokens: Tokens, method: Method) -> int:
    return int(
        sum(
            _tokens(entry.stream, block, tokens) * entry.width * (4 if entry.fp32 else method.compute_bytes)
            for entry in kept
        )
    )


def _tokens(stream: FootprintStream, block: FootprintBlock, tokens: Tokens) -> Fraction:
    if stream == "sample":
        return Fraction(1)
    return tokens[stream] * (block.tokens if stream == "image" else Fraction(1))
