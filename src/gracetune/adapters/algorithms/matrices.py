"""Matrix operations that several algorithms share: Tucker forms, norms and SVDs from factors, factorizations.

`change` is the tensor that an adapter adds to a weight. r is the rank. Norms are Frobenius norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PART = 1 << 22
"""The number of elements processed at a time."""
_MAX_EXACT = 1 << 29
"""Maximum multiplications for the exact norm of one layer. A file has hundreds of layers, so each must be fast."""
ROWS = 128
"""The number of sampled rows from which a norm is estimated, if the exact norm takes more than `_MAX_EXACT`."""


def reshape_change(change: Tensor, shape: torch.Size) -> Tensor:
    """The change [out, in * kernel] in the shape of the weight. Raises `ValueError` if rows or elements differ."""
    check_count(change.shape[0], shape[0], "rows", shape)
    check_count(change.numel(), shape.numel(), "elements", shape)
    return change.reshape(shape)


def check_count(found: int, wanted: int, what: str, shape: torch.Size) -> None:
    """Raise `ValueError` unless `found` is the `wanted` number of `what` (rows, elements)."""
    if found != wanted:
        raise ValueError(f"{found} {what} for a weight of shape {list(shape)}")


def tucker(left: Tensor, right: Tensor, core: Tensor | None) -> Tensor:
    """The product of [out, r] and [r, in]. With a core [r, r, *kernel], LyCORIS stores the left matrix as [r, out]."""
    if core is None:
        return left @ right
    import torch

    return torch.einsum("ab...,ao,bi->oi...", core, left, right)


def with_core(right: Tensor, core: Tensor) -> Tensor:
    """A core [r, r, *kernel] times [r, in], as [r, in * kernel]. A Tucker form is the left matrix times this."""
    import torch

    return torch.einsum("ab...,bi->ai...", core, right).flatten(1)


def parts_with_core(left: Tensor, core: Tensor) -> Iterator[Tensor]:
    """The product of [out, r] and a core [r, r, *kernel]: [kernel * out, r], in parts of whole kernel points."""
    import torch

    for points in _by_points(core).split(max(1, _PART // left.numel()), dim=2):
        yield torch.einsum("oa,abk->kob", left, points).flatten(0, 1)


def _by_points(core: Tensor) -> Tensor:
    """A core [r, r, *kernel] as [r, r, points]. A core without a kernel has one point."""
    return core.reshape(*core.shape[:2], -1)


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite. `aminmax` propagates NaN, allocates nothing and takes a tenth of `isfinite`."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(map(math.isfinite, map(float, tensor.detach().aminmax())))


# -- properties of a product computed from its factors: the product itself may not fit into memory --------------------


def product_norm(left: Tensor, right: Tensor) -> float:
    """The norm of L R by |L R|^2 = tr(L^T L R R^T): two [r, r] matrices instead of one of the weight's size."""
    left, right = left.double(), right.double()
    if left.shape[0] * right.shape[1] <= left.shape[1] ** 2:
        return float((left @ right).norm())
    return math.sqrt(max(0.0, float(((left.T @ left) * (right @ right.T)).sum())))


def tucker_norm(left: Tensor, right: Tensor, core: Tensor) -> float:
    """Like `product_norm`, with a core [r, r, *kernel] between left [r, out] and right [r, in]."""
    left, right, core = left.double(), right.double(), _by_points(core).double()
    return math.sqrt(max(0.0, float((core * _between(left @ left.T, core, right @ right.T)).sum())))


def _between(left: Tensor, core: Tensor, right: Tensor) -> Tensor:
    import torch

    return torch.einsum("aA,ABk,Bb->abk", left, core, right)


def hadamard_norm(rows: Iterable[tuple[Tensor, Tensor]], right: tuple[Tensor, Tensor], count: int) -> float:
    """|(A B) * (C D)|. `rows` yields A and C in parts (a few rows of A, the same rows of C), `count` rows in
    total. `right` is B and D, each [r, in].

    Row i of the product is (a_i (x) c_i) times the pairwise products of B's and D's rows, so the norm follows from two
    Gram matrices [r^2, r^2]. For a large rank, building the product row by row is cheaper. If both are too expensive
    (`is_estimated`), the norm is estimated from a sample of rows.
    """
    import torch

    rank, across = right[0].shape
    if is_estimated(count, across, rank):
        rows = [*rows]
        found = math.fsum(_estimate(*part, right, share=part[0].shape[0] / count) for part in rows)
        # A sampled 0 proves nothing; 0 means an unchanged layer, so only the exact computation may return it.
        if found > 0:
            return math.sqrt(found)
    if _by_pairs(count, across, rank) < _row_by_row(count, across, rank):
        both = _gram_of_pairs(rows, rank) * _gram_of_pairs([(right[0].T, right[1].T)], rank)
        return math.sqrt(max(0.0, float(both.sum())))
    squared = 0.0
    for first, second in rows:
        for a, c in _in_parts(first, second, across):
            part = (a @ right[0]).mul_(c @ right[1])
            squared += float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
    return math.sqrt(squared)


def is_estimated(count: int, across: int, rank: int) -> bool:
    """Whether `hadamard_norm` estimates the norm of a product [count, across]."""
    return min(_by_pairs(count, across, rank), _row_by_row(count, across, rank)) > _MAX_EXACT


def _by_pairs(count: int, across: int, rank: int) -> int:
    """Multiplications for the norm from two Gram matrices."""
    return (count + across) * rank**4


def _row_by_row(count: int, across: int, rank: int) -> int:
    """Multiplications for the norm of the product, built row by row."""
    return 2 * count * across * rank


def _estimate(first: Tensor, second: Tensor, right: tuple[Tensor, Tensor], *, share: float) -> float:
    """An unbiased estimate of the squared norm of these rows, by importance sampling with a fixed seed.

    Row i is chosen with a probability proportional to |a_i|^2 |c_i|^2, and its squared norm is divided by that
    probability.
    """
    import torch

    ends = (_squares(first) * _squares(second)).cumsum(0)
    total = ends[-1]
    if total == 0:
        return 0.0
    points = torch.rand(math.ceil(ROWS * share), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chosen = torch.searchsorted(ends, points * total, right=True).clamp_(max=len(ends) - 1)
    squared = 0.0
    for part in chosen.split(max(1, _PART // right[0].shape[1])):
        a, c = first[part], second[part]
        probable = _squares(a) * _squares(c) / total
        rows = (a @ right[0]).mul_(c @ right[1])
        squared += float((_squares(rows) / probable).sum())
    return squared / len(chosen)


def _squares(rows: Tensor) -> Tensor:
    """The squared norm of each row in fp64, without a copy of the rows in fp64."""
    import torch

    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return lengths.square()


def _gram_of_pairs(rows: Iterable[tuple[Tensor, Tensor]], rank: int) -> Tensor:
    """The Gram matrix [r^2, r^2] of the pairwise products of columns."""
    import torch

    found = torch.zeros(rank**2, rank**2, dtype=torch.float64)
    for first, second in rows:
        for a, c in _in_parts(first, second, rank**2):
            pairs = pairs_of_columns(a.double(), c.double())
            found += pairs.T @ pairs
    return found


def _in_parts(first: Tensor, second: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Equal row ranges of both, so that a result with `width` columns has at most about `_PART` elements."""
    count = max(1, _PART // width)
    return zip(first.split(count), second.split(count), strict=True)


def pairs_of_columns(first: Tensor, second: Tensor) -> Tensor:
    """The row-wise Kronecker product of [n, r] and [n, r]: [n, r^2]."""
    return (first.unsqueeze(2) * second.unsqueeze(1)).flatten(1)


def svd_of_product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The SVD of L R. QR decompositions of L and R^T reduce it to the SVD of an [r, r] matrix."""
    import torch

    (first, first_upper), (second, second_upper) = torch.linalg.qr(left.double()), torch.linalg.qr(right.double().T)
    inner, values, outer = torch.linalg.svd(first_upper @ second_upper.T, full_matrices=False)
    return first @ inner, values, outer @ second.T


def core_size(core: Tensor | None) -> int:
    """The number of kernel points of a Tucker core; 1 without a core."""
    return 1 if core is None else math.prod(core.shape[2:])


def core_rejection(core: Tensor | None) -> str | None:
    """Why ComfyUI cannot load a layer with this Tucker core; None if it can."""
    if core is not None and core.ndim != 4:
        return "ComfyUI takes Tucker forms of 2-d convolutions only"
    return None


def factorization(dimension: int, factor: int) -> tuple[int, int]:
    """LyCORIS' split of a dimension into two factors, the smaller first.

    If `factor` divides the dimension, the result is `factor` and the quotient. Otherwise it is the most even split
    whose smaller factor is at most `factor`. -1 means no limit.
    """
    if factor > 0 and dimension % factor == 0:
        return min(factor, dimension // factor), max(factor, dimension // factor)
    limit = factor if factor > 0 else dimension
    divisors = [small for small in range(1, math.isqrt(dimension) + 1) if dimension % small == 0 and small <= limit]
    small = divisors[-1]
    return small, dimension // small
