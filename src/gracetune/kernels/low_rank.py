"""Products with a small inner or outer dimension (a LoRA's rank) on a GPU, bound by the memory they read or write.

The matrix library's kernels are made for a long inner dimension. With a rank of sixteen they take twice as long as
writing the result. For sixteen output columns the library needs three kernels, because one would leave most of the GPU
idle.
"""

from __future__ import annotations

from typing import Any, Final, no_type_check

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from gracetune import kernels

_LEAST: Final = 16
"""The smallest side the matrix units support. The rest is padded with zeros."""
_ROWS: Final = 64
_COLUMNS: Final = 128
_ROWS_TO_RANK: Final = 32
"""With this, 4096 tokens are 128 programs, about the number of an H200's multiprocessors."""
_DEEP: Final = (256, 5)
"""Columns per tile, and tiles in flight. More of both hides the memory's latency."""
_SHALLOW: Final = (128, 3)
"""The same for GPUs with less shared memory."""
_DEEP_BYTES: Final = 128 << 10
"""Shared memory that `_DEEP` needs."""


@triton.jit
@no_type_check
def _multiply(
    left, right, bias, out, n, m, left_row, left_column, right_row, right_column,
    R: tl.constexpr, R_TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """One tile of left times right."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, R_TILE)
    first = tl.load(
        left + row[:, None] * left_row + inner[None, :] * left_column,
        mask=(row[:, None] < n) & (inner[None, :] < R), other=0.0,
    )  # fmt: skip
    second = tl.load(
        right + inner[:, None] * right_row + column[None, :] * right_column,
        mask=(inner[:, None] < R) & (column[None, :] < m), other=0.0,
    )  # fmt: skip
    result = tl.dot(first, second, input_precision="ieee")
    if BIASED:
        result += tl.load(bias + column, mask=column < m, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * m + column[None, :], result.to(out.dtype.element_ty),
        mask=(row[:, None] < n) & (column[None, :] < m),
    )  # fmt: skip


@triton.jit
@no_type_check
def _gather(
    rows, factor, out, n, K: tl.constexpr, R: tl.constexpr, FACTOR_ROW: tl.constexpr, FACTOR_COLUMN: tl.constexpr,
    R_TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS rows of rows times factor."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rank = tl.arange(0, R_TILE)
    first = rows + row.to(tl.int64)[:, None] * K
    total = tl.zeros([ROWS, R_TILE], tl.float32)
    for start in tl.range(0, K, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        addresses = factor + column[:, None] * FACTOR_ROW + rank[None, :] * FACTOR_COLUMN
        if K % COLUMNS == 0:
            column_values = tl.load(first + column[None, :], mask=row[:, None] < n, other=0.0)
            rank_values = tl.load(addresses, mask=rank[None, :] < R, other=0.0)
        else:
            column_values = tl.load(first + column[None, :], mask=(row[:, None] < n) & (column[None, :] < K), other=0.0)
            rank_values = tl.load(addresses, mask=(column[:, None] < K) & (rank[None, :] < R), other=0.0)
        total = tl.dot(column_values, rank_values, total, input_precision="ieee")
    tl.store(
        out + row.to(tl.int64)[:, None] * R + rank[None, :], total.to(out.dtype.element_ty),
        mask=(row[:, None] < n) & (rank[None, :] < R),
    )  # fmt: skip


@triton_op("gracetune::to_rank", mutates_args={})
def to_rank(rows: Tensor, factor: Tensor) -> Tensor:
    """rows [n, k] times factor [k, r] for a small r. The factor may have any strides."""
    rows = rows.contiguous()
    (n, k), r = rows.shape, factor.shape[1]
    out = rows.new_empty(n, r)
    columns, stages = _DEEP if kernels.shared_bytes(rows.device) >= _DEEP_BYTES else _SHALLOW
    kernel: Any = wrap_triton(_gather)
    kernel[(triton.cdiv(n, _ROWS_TO_RANK),)](
        rows, factor, out, n, K=k, R=r, FACTOR_ROW=factor.stride(0), FACTOR_COLUMN=factor.stride(1),
        R_TILE=max(_LEAST, triton.next_power_of_2(r)), ROWS=_ROWS_TO_RANK, COLUMNS=columns, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return out


@triton_op("gracetune::thin", mutates_args={})
def thin(left: Tensor, right: Tensor) -> Tensor:
    """left [n, r] times right [r, m] for a small r, both with any strides."""
    return _launch(wrap_triton(_multiply), left, right, None)


def thin_at_once(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """The same with a bias [m], for the body of a custom operator.

    Compiled graphs call that operator, and the compiler does not look into it, so the kernel is launched directly.
    """
    return _launch(_multiply, left, right, bias)


def _launch(kernel: Any, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    (n, r), m = left.shape, right.shape[1]
    out = left.new_empty(n, m)
    grid = (triton.cdiv(m, _COLUMNS), triton.cdiv(n, _ROWS))
    strides = (left.stride(0), left.stride(1), right.stride(0), right.stride(1))
    kernel[grid](
        left, right, left if bias is None else bias, out, n, m, *strides, r, max(_LEAST, triton.next_power_of_2(r)),
        _ROWS, _COLUMNS, bias is not None, num_warps=4,
    )  # fmt: skip
    return out
