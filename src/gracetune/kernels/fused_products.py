"""Frozen layers' products added, on a GPU, to what the adapter has already put in their place.

The matrix library adds to what is in memory while it writes: the adapter's part is then never read by anyone else, and
the sum is not written a second time. As one operation, because a compiler keeps the products apart otherwise and makes
a copy before it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gracetune.kernels import HAS_TRITON

_THIN: Final = 64
"""The widest inner side `thin` is for."""
_TO_RANK: Final = 16
"""The most columns `to_rank` is for: at 48 the matrix library is faster."""
_LIBRARY = torch.library.Library("gracetune", "FRAGMENT")
_LIBRARY.define("products(Tensor a, Tensor b, Tensor? bias, Tensor[] lefts, Tensor[] rights) -> Tensor")
_LIBRARY.define("mixed_and_product(Tensor small, Tensor rows, Tensor? bias, Tensor c, Tensor d) -> Tensor")


@torch.library.impl(_LIBRARY, "products", "CompositeExplicitAutograd")
def _products(a: Tensor, b: Tensor, bias: Tensor | None, lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    result = _thin(a, b, bias)
    for left, right in zip(lefts, rights, strict=True):
        result.addmm_(left, right)
    return result


def _thin(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if is_thin(a):
        from gracetune.kernels.low_rank import thin_at_once  # only a GPU has triton

        return thin_at_once(a, b, bias)
    return a.mm(b) if bias is None else torch.addmm(bias, a, b)


def is_thin(a: Tensor) -> bool:
    return a.device.type == "cuda" and HAS_TRITON and a.shape[1] <= _THIN


def goes_to_rank(rows: Tensor, factor: Tensor) -> bool:
    return rows.device.type == "cuda" and HAS_TRITON and factor.shape[1] <= _TO_RANK


@torch.library.register_fake("gracetune::products", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _shape(a: Tensor, b: Tensor, bias: Tensor | None, lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@register_flop_formula(torch.ops.gracetune.products)
def _flops(a: Any, b: Any, bias: Any, lefts: Any, rights: Any, **_: object) -> int:
    """What a compiler weighs when it looks for work to repeat."""
    pairs = [(a, b), *zip(lefts, rights, strict=True)]
    return int(sum(2 * left[0] * left[1] * right[1] for left, right in pairs))


@torch.library.impl(_LIBRARY, "mixed_and_product", "CUDA")
def _mixed_and_product(small: Tensor, rows: Tensor, bias: Tensor | None, c: Tensor, d: Tensor) -> Tensor:
    from gracetune.kernels.lokr_mixing import mixed_at_once  # only a GPU has triton

    return mixed_at_once(small, rows, bias).reshape(c.shape[0], d.shape[1]).addmm_(c, d)


@torch.library.register_fake("gracetune::mixed_and_product", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _mixed_shape(small: Tensor, rows: Tensor, bias: Tensor | None, c: Tensor, d: Tensor) -> Tensor:
    return c.new_empty(c.shape[0], d.shape[1])


@register_flop_formula(torch.ops.gracetune.mixed_and_product)
def _mixed_flops(small: Any, rows: Any, bias: Any, c: Any, d: Any, **_: object) -> int:
    return int(2 * rows[0] * small[0] * small[1] * rows[2] + 2 * c[0] * c[1] * d[1])


def mixed_and_product(small: Tensor, rows: Tensor, bias: Tensor | None, c: Tensor, d: Tensor) -> Tensor:
    """small [p, q] on each of rows [n, q, k], seen as [n, p k], and c d and the bias added to it."""
    result: Tensor = torch.ops.gracetune.mixed_and_product(small, rows, bias, c, d)
    return result


OPERATIONS: Final = (torch.ops.gracetune.products, torch.ops.gracetune.mixed_and_product)


def products(
    a: Tensor, b: Tensor, bias: Tensor | None, lefts: Sequence[Tensor], rights: Sequence[Tensor]
) -> Tensor:  # fmt: skip
    """a b + bias, rounded, and each left right added to it."""
    result: Tensor = torch.ops.gracetune.products(a, b, bias, list(lefts), list(rights))
    return result
