"""The way back through a GELU on a GPU, with a LoRA's part of the gradient made where it is needed.

A low-rank product is as large as the frozen one it is added to, and is nowhere needed but in this sum: computed in the
kernel that reads the sum anyway, it is neither written nor read.
"""

from __future__ import annotations

from typing import Any, Final, no_type_check

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

_LEAST: Final = 16
_ROWS: Final = 64
_COLUMNS: Final = 128


@triton.jit
@no_type_check
def _back_through_gelu(
    gradient, left, right, before, out, n, M: tl.constexpr, R: tl.constexpr,
    LEFT_ROW: tl.constexpr, RIGHT_ROW: tl.constexpr, RIGHT_COLUMN: tl.constexpr,
    R_TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile: gelu(x) = x s with s = sigmoid(2 u), u = c (x + 0.044715 x^3), so gelu' = s + x s (1 - s) 2 u'."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, R_TILE)
    places = row.to(tl.int64)[:, None] * M + column[None, :]
    inside = (row[:, None] < n) & (column[None, :] < M)
    first = tl.load(
        left + row[:, None] * LEFT_ROW + inner[None, :], mask=(row[:, None] < n) & (inner[None, :] < R), other=0.0
    )
    second = tl.load(
        right + inner[:, None] * RIGHT_ROW + column[None, :] * RIGHT_COLUMN,
        mask=(inner[:, None] < R) & (column[None, :] < M), other=0.0,
    )  # fmt: skip
    x = tl.load(before + places, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
    given += tl.dot(first, second, input_precision="ieee")
    square = x * x
    s = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * square)))
    slope = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * square)
    tl.store(out + places, (given * slope).to(out.dtype.element_ty), mask=inside)


@triton_op("gracetune::back_through_gelu", mutates_args={})
def back_through_gelu(gradient: Tensor, left: Tensor, right: Tensor, before: Tensor) -> Tensor:
    """(gradient + left right) gelu'(before): gradient and before [n, m], left [n, r] by rows, right [r, m]."""
    gradient, left, before = gradient.contiguous(), left.contiguous(), before.contiguous()
    (n, m), r = before.shape, left.shape[1]
    out = before.new_empty(n, m)
    kernel: Any = wrap_triton(_back_through_gelu)
    kernel[(triton.cdiv(m, _COLUMNS), triton.cdiv(n, _ROWS))](
        gradient, left, right, before, out, n, M=m, R=r, LEFT_ROW=r, RIGHT_ROW=right.stride(0),
        RIGHT_COLUMN=right.stride(1), R_TILE=max(_LEAST, triton.next_power_of_2(r)), ROWS=_ROWS, COLUMNS=_COLUMNS,
        num_warps=4,
    )  # fmt: skip
    return out
