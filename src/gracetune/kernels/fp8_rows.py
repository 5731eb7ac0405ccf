"""Rounding rows to e4m3 on a GPU: `models.eight_bit_linear.quantize_rows` in one pass that reads its input once.

A row's scale is known only after the whole row was read. A program therefore holds the row in registers, tile by tile,
so that it need not be read again. The maximum is taken over the absolute values' bit patterns as integers: they sort
like the numbers, and NaN sorts above all, so a NaN reaches the scale and with it the whole row.
"""

from __future__ import annotations

from typing import Any, Final, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from gracetune.kernels import E4M3, E4M3_MAX, E4M3_SMALLEST_ROW

_WARPS: Final = 8
"""Warps per row."""
_WIDE: Final = 16384
"""Rows wider than this get twice the warps, because registers per thread are limited."""


@triton.jit
@no_type_check
def _round_rows(
    x, columns, out, scales,
    K: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    SMALLEST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Quantizes one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    held = ()
    bits = tl.zeros([TILE], tl.int32)
    for tile in tl.static_range(TILES):
        at = tile * TILE + column
        values = tl.load(x + row * K + at, mask=at < K, other=0.0, eviction_policy="evict_first")
        if HAS_COLUMNS:  # all rows read the same factors, so keep them in the cache
            factors = tl.load(columns + at, mask=at < K, other=0.0, eviction_policy="evict_last")
            values = values.to(tl.float32) * factors
        held = held + (values,)  # noqa: RUF005 - triton has no unpacking
        bits = tl.maximum(bits, values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = tl.max(bits, 0).to(tl.float32, bitcast=True)
    most = tl.where(largest < SMALLEST, SMALLEST, largest)  # the comparison is false for NaN, which is kept
    tl.store(scales + row, tl.div_rn(most, MOST))
    factor = tl.div_rn(1.0, most) * MOST  # reciprocal first, as torch computes number / tensor
    for tile in tl.static_range(TILES):
        at = tile * TILE + column
        rounded = tl.clamp(held[tile].to(tl.float32) * factor, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + row * K + at, rounded.to(tl.float8e4nv), mask=at < K)


def _sizes(k: int, has_columns: bool) -> tuple[dict[str, int], int]:
    """The kernel's tile sizes, and the number of warps per row.

    A thread loads 16 bytes at a time: 8 elements of x, or 4 with `columns`, which are wider.
    """
    by_warp = 32 * (4 if has_columns else 8)
    warps = min(max(triton.next_power_of_2(k) // by_warp, 1), _WARPS if k <= _WIDE else 2 * _WARPS)
    tile = warps * by_warp
    return {"K": k, "TILE": tile, "TILES": triton.cdiv(k, tile)}, warps


@triton_op("gracetune::rounded_rows", mutates_args={})
def rounded_rows(x: Tensor, columns: Tensor | None) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of x [n, k] times columns [1, k] in fp32: e4m3 values [n, k], and scales [n, 1]."""
    n, k = x.shape
    x = x.contiguous()
    factors = x if columns is None else columns.contiguous()  # the kernel needs a pointer; it does not read it then
    out, scales = x.new_empty(n, k, dtype=E4M3), x.new_empty(n, 1, dtype=torch.float32)
    sizes, warps = _sizes(k, columns is not None)
    kernel: Any = wrap_triton(_round_rows)
    kernel[(n,)](
        x, factors, out, scales, **sizes, HAS_COLUMNS=columns is not None, SMALLEST=E4M3_SMALLEST_ROW, MOST=E4M3_MAX,
        num_warps=warps,
    )  # fmt: skip
    return out, scales
