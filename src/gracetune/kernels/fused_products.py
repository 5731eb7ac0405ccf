"""Products of frozen layers, added on a GPU to the adapter's output in place.

The matrix library accumulates into memory as it writes. The adapter's output is therefore not read separately, and the
sum is not written a second time. The whole is one operation, because torch's compiler would otherwise keep the products
apart and copy before adding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gracetune.kernels import HAS_TRITON

_THIN: Final = 64
"""The largest inner dimension for which `low_rank.thin` is used."""
_TO_RANK: Final = 16
"""The most columns for which `low_rank.to_rank` is used: at 48 the matrix library is faster."""
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
        from gracetune.kernels.low_rank import thin_at_once  # triton is only installed with CUDA builds of torch

        return thin_at_once(a, b, bias)
    return a.mm(b) if bias is None else torch.addmm(bias, a, b)


def is_thin(a: Tensor) -> bool:
    """Whether `low_rank.thin` should compute products with `a`."""
    return a.device.type == "cuda" and HAS_TRITON and a.shape[1] <= _THIN


def goes_to_rank(rows: Tensor, factor: Tensor) -> bool:
    """Whether `low_rank.to_rank` should compute this product."""
    return rows.device.type == "cuda" and HAS_TRITON and factor.shape[1] <= _TO_RANK


@torch.library.register_fake("gracetune::products", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _shape(a: Tensor, b: Tensor, bias: Tensor | None, lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@register_flop_formula(torch.ops.gracetune.products)
def _flops(a: Any, b: Any, bias: Any, lefts: Any, rights: Any, **_: object) -> int:
    """The cost that torch's compiler considers when it decides what to recompute."""
    pairs = [(a, b), *zip(lefts, rights, strict=True)]
    return int(sum(2 * left[0] * left[1] * right[1] for left, right in pairs))


@torch.library.impl(_LIBRARY, "mixed_and_product", "CUDA")
def _mixed_and_product(small: Tensor, rows: Tensor, bias: Tensor | None, c: Tensor, d: Tensor) -> Tensor:
    from gracetune.kernels.lokr_mixing import mixed_at_once  # triton is only installed with CUDA builds of torch

    return mixed_at_once(small, rows, bias).reshape(c.shape[0], d.shape[1]).addmm_(c, d)


@torch.library.register_fake("gracetune::mixed_and_product", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _mixed_shape(small: Tensor, rows: Tensor, bias: Tensor | None, c: Tensor, d: Tensor) -> Tensor:
    return c.new_empty(c.shape[0], d.shape[1])


@register_flop_formula(torch.ops.gracetune.mixed_and_product)
def _mixed_flops(small: Any, rows: Any, bias: Any, c: Any, d: Any, **_: object) -> int:
    return int(2 * rows[0] * small[0] * small[1] * rows[2] + 2 * c[0] * c[1] * d[1])


def mixed_and_product(small: Tensor, rows: Tensor, bias: Tensor | None, c: Tensor, d: Tensor) -> Tensor:
    """small [p, q] times each of rows [n, q, k], seen as [n, p k], plus c d and the bias."""
    result: Tensor = torch.ops.gracetune.mixed_and_product(small, rows, bias, c, d)
    return result


OPERATIONS: Final = (torch.ops.gracetune.products, torch.ops.gracetune.mixed_and_product)
"""For code that lists custom operators, such as activation checkpointing policies."""


def products(
    a: Tensor, b: Tensor, bias: Tensor | None, lefts: Sequence[Tensor], rights: Sequence[Tensor]
) -> Tensor:  # fmt: skip
    """a b + bias, rounded, plus each product of a left and a right."""
    result: Tensor = torch.ops.gracetune.products(a, b, bias, list(lefts), list(rights))
    return result
