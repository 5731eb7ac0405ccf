"""Multiplication by LoKr's small factor on a GPU, in one pass over its input.

A batched product of a 16 x 16 with a 16 x 320 matrix for each token takes the matrix library four to six times as long
as reading and writing the data, because its kernels are made for larger matrices. This kernel is memory-bound.
"""

from __future__ import annotations

from typing import Any, Final, no_type_check

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

_LEAST: Final = 16
"""The smallest side the matrix units support. Smaller factors are padded with zeros."""
_COLUMNS: Final = 256
"""Columns per program, over all its tokens."""


@triton.jit
@no_type_check
def _mix(
    small, rows, bias, out, tokens, small_row, small_column,
    P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    P_TILE: tl.constexpr, Q_TILE: tl.constexpr, K_TILE: tl.constexpr, TOKENS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Computes TOKENS tokens and K_TILE columns of each."""
    column = tl.arange(0, TOKENS * K_TILE)
    token = tl.program_id(0).to(tl.int64) * TOKENS + column // K_TILE
    within = tl.program_id(1) * K_TILE + column % K_TILE
    p, q = tl.arange(0, P_TILE), tl.arange(0, Q_TILE)
    inside = (token < tokens) & (within < K)
    factor = tl.load(
        small + p[:, None] * small_row + q[None, :] * small_column, mask=(p[:, None] < P) & (q[None, :] < Q), other=0.0
    )
    given = tl.load(
        rows + (token * (Q * K) + within)[None, :] + q[:, None] * K, mask=inside[None, :] & (q[:, None] < Q), other=0.0
    )
    mixed = tl.dot(factor, given, input_precision="ieee")
    if BIASED:
        mixed += tl.load(
            bias + within[None, :] + p[:, None] * K, mask=(within[None, :] < K) & (p[:, None] < P), other=0.0
        ).to(tl.float32)
    tl.store(
        out + (token * (P * K) + within)[None, :] + p[:, None] * K, mixed.to(out.dtype.element_ty),
        mask=inside[None, :] & (p[:, None] < P),
    )  # fmt: skip


@triton_op("gracetune::mixed", mutates_args={})
def mixed(small: Tensor, rows: Tensor) -> Tensor:
    """small [p, q] times each of rows [n, q, k], in fp32 and rounded once."""
    return _launch(wrap_triton(_mix), small, rows, None)


def mixed_at_once(small: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    """The same with a bias [p k], for the body of a custom operator.

    Compiled graphs call that operator, and the compiler does not look into it, so the kernel is launched directly.
    """
    return _launch(_mix, small, rows, bias)


def _launch(kernel: Any, small: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    (p, q), (n, _, k) = small.shape, rows.shape
    rows = rows.contiguous()
    out = rows.new_empty(n, p, k)
    k_tile = min(64, k & -k) if k % _LEAST == 0 else triton.next_power_of_2(min(k, 64))
    tokens = max(1, _COLUMNS // k_tile)
    grid = (triton.cdiv(n, tokens), triton.cdiv(k, k_tile))
    sides = (max(_LEAST, triton.next_power_of_2(p)), max(_LEAST, triton.next_power_of_2(q)))
    kernel[grid](
        small, rows, rows if bias is None else bias, out, n, small.stride(0), small.stride(1), p, q, k, *sides, k_tile,
        tokens, bias is not None, num_warps=4,
    )  # fmt: skip
    return out
