"""How a layer's adapter is computed, the reason, and the memory it keeps for the backward pass.

The algorithm's record decides this once. The layers (`adapters.fast`) and the planner both follow that decision.
The forms, with (x) for the Kronecker product and * for the product element by element:

    low rank            up (down x): LoRA, LoCon; DoRA also scales the rows of the output
    kronecker           (W1 (x) W2) x as a product with W1 and one with W2, with x reshaped to a matrix
    kronecker by rank   the same with W2 = A B not multiplied out: products with B, then W1, then A
    hadamard by rank    (A B) * (C D) = (pairs of columns of A and C) (pairs of rows of B and D), of rank r^2
    hadamard rebuilt    the change is built in the forward pass and again in the backward pass
    reference           peft's layer, or the change built by `adapters.delta` and kept. The others are compared with it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = str
"""One of the forms above, or a form that the fused layer of another package defines."""
REFERENCE = "reference"
AdapterPath = Literal["auto", "reference"]
"""`auto`: the faster forms where there is one, as in every run. `reference`: the reference computation everywhere."""


@dataclass(frozen=True)
class Computation:
    form: Form
    why: str
    kept: int = 0
    """Elements kept for each token in addition to the layer's input, in the compute precision."""
    w1_first: bool = True
    """Kronecker only: whether the product with W1 comes before the one with W2."""
    compiled_constant: int = 0
    """Elements that a compiled graph keeps whatever the batch size, in addition to the adapter's tensors and their
    casts."""
    rebuilds_weight: bool = False
    """The change of the weight is built and kept for the gradient of the input."""
    backward_bytes: int = 0
    """Peak bytes in the backward pass for each element of the weight, until the gradient has reached the factors."""
    casts_tensors: bool = True
    """Copies of the adapter's tensors in the compute precision are kept for the backward pass."""
    copies_input: bool = False
    """The input is cast to fp32 and back, so each layer keeps a copy. A compiler merges equal copies."""
    fp32_output: bool = False
    """The output is scaled in fp32. This takes another temporary tensor, unless a compiler fuses it."""

    @property
    def path(self) -> Literal["factorised", "rebuilt", "reference"]:
        if self.form == REFERENCE:
            return "reference"
        return "rebuilt" if self.form == "hadamard rebuilt" else "factorised"
