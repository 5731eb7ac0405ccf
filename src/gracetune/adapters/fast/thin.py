"""Products of a few columns with a few rows on a GPU: what they write is all they cost.

The matrix library takes twice the time that writing the result takes: its kernels wait for a long inner side, and a
LoRA's has sixteen numbers.
"""

from __future__ import annotations

from typing import Any, Final, no_type_check

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

_LEAST: Final = 16
"""What the matrix units multiply at least; what is missing is filled up with zeros."""
_ROWS: Final = 64
_COLUMNS: Final = 128


@triton.jit
@no_type_check
def _multiply(
    left, right, bias, out, n, m, left_row, left_column, right_row, right_column,
    R: tl.constexpr, R_TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """A tile of the result."""
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


@triton_op("gracetune::thin", mutates_args={})
def thin(left: Tensor, right: Tensor) -> Tensor:
    """left [n, r] right [r, m], for a small r; in any strides."""
    return _launch(wrap_triton(_multiply), left, right, None)


def thin_at_once(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """The same with a bias [m], where no compiler looks on."""
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
