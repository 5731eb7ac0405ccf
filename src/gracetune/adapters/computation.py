"""How the adapter on one layer is computed, why so, and what that keeps for the backward pass.

Each algorithm's record decides it once, so that what runs (`adapters.fast`) and what is planned are the same thing:

    low rank            up (down x): LoRA, LoCon; DoRA with the length of each row on top
    kronecker           (W1 (x) W2) x as one product with each factor, on an input seen as a matrix
    kronecker by rank   the same with W2 = A B left apart: x meets B, then W1, then A
    hadamard by rank    (A B) * (C D) is a product of rank r^2: that of the factors' rows and columns pair by pair
    hadamard rebuilt    the change itself, built in the forward and once more in the backward pass
    library             peft's layer, or the change built by `adapters.delta` and kept: the reference
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = str
"""One of those above, or a form that another package's fused layer has."""
LIBRARY = "library"


@dataclass(frozen=True)
class Computation:
    form: Form
    why: str
    kept: int = 0
    """Elements for each token beside the layer's input, in the precision of the computation."""
    w1_first: bool = True
    """Kronecker: the order of the two products."""
    compiled_constant: int = 0
    """Elements that a compiler keeps whatever the batch, beside the adapter's tensors and casts of them."""
    rebuilds_weight: bool = False
    """The whole change is built and kept for the input's gradient."""
    backward_bytes: int = 0
    """For each weight of the layer, alive at once in the backward pass until the gradient has reached the factors."""
    casts_tensors: bool = True
    """Copies of the adapter's tensors in the precision of the computation are kept for the backward pass."""
    copies_input: bool = False
    """The input is cast to fp32 and back, so each layer keeps a copy. Compiled, equal copies become one."""
    fp32_output: bool = False
    """The output is scaled in fp32: another working tensor, unless a compiler does it in one pass."""

    @property
    def path(self) -> Literal["factorised", "rebuilt", "library"]:
        if self.form == LIBRARY:
            return "library"
        return "rebuilt" if self.form == "hadamard rebuilt" else "factorised"
