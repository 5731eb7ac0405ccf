"""Small steps that several algorithms' changes have in common."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def shaped(change: Tensor, shape: torch.Size) -> Tensor:
    """A kernel may have been flattened into the columns; rows stay rows, or it is another layer's change."""
    expect(change.shape[0], shape[0], "rows", shape)
    expect(change.numel(), shape.numel(), "elements", shape)
    return change.reshape(shape)


def expect(found: int, wanted: int, what: str, shape: torch.Size) -> None:
    if found != wanted:
        raise ValueError(f"{found} {what} for a weight of shape {list(shape)}")


def tucker(left: Tensor, right: Tensor, core: Tensor | None) -> Tensor:
    """[out, r] by [r, in]; with a core [r, r, *kernel] LyCORIS stores the left one as [r, out]."""
    if core is None:
        return left @ right
    import torch

    return torch.einsum("ab...,ao,bi->oi...", core, left, right)


def core_size(core: Tensor | None) -> int:
    """Points of the kernel that a Tucker form's core has."""
    return 1 if core is None else math.prod(core.shape[2:])


def core_refusal(core: Tensor | None) -> str | None:
    """ComfyUI's, of a Tucker form."""
    if core is not None and core.ndim != 4:
        return "ComfyUI takes Tucker forms of 2-d convolutions only"
    return None


def factorization(dimension: int, factor: int) -> tuple[int, int]:
    """LyCORIS' split of a dimension into two factors, the smaller first: the most even one up to `factor`."""
    if factor > 0 and dimension % factor == 0:
        return min(factor, dimension // factor), max(factor, dimension // factor)
    limit = factor if factor > 0 else dimension
    divisors = [small for small in range(1, math.isqrt(dimension) + 1) if dimension % small == 0 and small <= limit]
    small = divisors[-1]
    return small, dimension // small
