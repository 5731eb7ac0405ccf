"""How the adapter on one linear layer is computed, why so, and what that keeps for the backward pass. Pure.

Decided once, here, so that what runs (`adapters.fast`) and what is planned (`planning.activations`) are the same thing:

    low rank            up (down x): LoRA, LoCon; DoRA with the length of each row on top
    kronecker           (W1 (x) W2) x as one product with each factor, on an input seen as a matrix
    kronecker by rank   the same with W2 = A B left apart: x meets B, then W1, then A
    hadamard by rank    (A B) * (C D) is a product of rank r^2: that of the factors' rows and columns pair by pair
    hadamard rebuilt    the change itself, built in the forward and once more in the backward pass
    library             peft's layer, or the change built by `adapters.delta` and kept: the reference
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from gracetune.adapters.trainable import Kronecker, LokrOptions, Target, kronecker

Form = Literal["low rank", "kronecker", "kronecker by rank", "hadamard by rank", "hadamard rebuilt", "library"]
KEPT_SHARE = 4
"""Leaving W2 apart saves work and keeps activations: worth it while they are at most the input's over this."""


@dataclass(frozen=True)
class Computation:
    form: Form
    why: str
    kept: int = 0
    """Elements for each token beside the layer's input, in the precision of the computation."""
    w1_first: bool = True
    """Kronecker: the order of the two products."""

    @property
    def path(self) -> Literal["factorised", "rebuilt", "library"]:
        if self.form == "library":
            return "library"
        return "rebuilt" if self.form == "hadamard rebuilt" else "factorised"


class Options(LokrOptions, Protocol):
    @property
    def dropout(self) -> float: ...


def choose(kind: str, inputs: int, outputs: int, options: Options) -> Computation:
    """For a linear layer."""
    if kind in ("lora", "locon"):
        return of_low_rank(options.rank)
    if kind == "dora":
        return of_dora(options.rank, outputs, dropout=options.dropout > 0)
    if kind == "loha":
        return of_loha(inputs, outputs, options.rank)
    if kind == "lokr":
        return of_lokr(kronecker(inputs, outputs, options))
    return reference(f"{kind} has no factorised form")


def computation(target: Target) -> Computation:
    """Of one kind of matrix in a plan."""
    linear, adapter = target.linear, target.adapter
    if linear.kernel:
        return reference("convolutions")
    return choose(adapter.kind, linear.inputs, linear.outputs, adapter)


def reference(why: str) -> Computation:
    return Computation("library", why)


def of_low_rank(rank: int) -> Computation:
    return Computation("low rank", "two products of the rank's width", kept=rank)


def of_dora(rank: int, outputs: int, *, dropout: bool) -> Computation:
    if dropout:
        return reference("DoRA's dropout lets the base layer run twice")
    return Computation("low rank", "two products of the rank's width, rows scaled after them", kept=rank + outputs)


def of_lokr(split: Kronecker) -> Computation:
    """Counted in multiplications for each token."""
    (a, c), (b, d), rank = split.first, split.second, split.rank
    w1_first, w2_first = a * c * d + a * b * d, c * b * d + a * c * b
    apart, kept = rank * (c * d + a * c + a * b), rank * (a + c)
    if split.second_apart and apart < min(w1_first, w2_first) and kept * KEPT_SHARE <= c * d:
        return Computation("kronecker by rank", "products with W2's factors and with W1", kept=kept)
    return Computation("kronecker", "a product with W1 and one with W2", w1_first=w1_first <= w2_first)


def of_loha(inputs: int, outputs: int, rank: int) -> Computation:
    """The product of rank r^2 takes r^2 (in + out) multiplications a token, the change itself in x out."""
    pairs = rank * rank
    if pairs * (inputs + outputs) <= inputs * outputs:
        return Computation("hadamard by rank", f"two products of width {pairs}", kept=pairs)
    return Computation("hadamard rebuilt", f"products of width {pairs} would cost more than the change itself")
