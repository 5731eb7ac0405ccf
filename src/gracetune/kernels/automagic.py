"""The kernels of `optim.automagic_stack`. Importing this module needs triton.

Each works on M matrices of R x C at once; a tensor has `lead` matrices. `gradients` and `addresses` are tables of
tensor addresses. `slots` maps a tensor to its index in the stacked optimizer state. A program works on one of the
`blocks` of one matrix. The launch grid is one-dimensional, because its other dimensions are limited to 65,535.
`by_row` and `by_col` are the factors that normalize a gradient by its row and column moments. `damping` limits the RMS
of a tensor's update. `high` and `wide` are the rows and columns of a tile. `bad` is a scalar flag: if it is not 0 (a
non-finite gradient), nothing is written.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

_TILE = 4096
"""Elements of a two-dimensional tile."""
_FLAT = 2048
"""Elements of a one-dimensional tile."""
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class KernelShape:
    """Sizes of the stacked parameters that have a gradient."""

    tensors: int
    lead: int
    rows: int
    columns: int
    aligned: bool
    """Whether every matrix starts at an address that allows 16-byte loads."""

    @classmethod
    def of(cls, shape: torch.Size, tensors: int, *, aligned: bool) -> KernelShape:
        return cls(tensors, shape[:-2].numel(), shape[-2], shape[-1], aligned)

    @property
    def matrices(self) -> int:
        return self.tensors * self.lead


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _matrix(table, matrix, lead, rows, columns, dtype: tl.constexpr, aligned: tl.constexpr):
    """Pointer to the first element of a matrix."""
    base = tl.load(table + matrix // lead).to(tl.pointer_type(dtype)) + (matrix % lead).to(tl.int64) * rows * columns
    if aligned:
        base = tl.multiple_of(base, 16)
    return base


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _slot(slots, matrix, lead):
    """Index of a matrix in the stacked state."""
    return tl.load(slots + matrix // lead) * lead + matrix % lead


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _writable(size, bad):
    """Number of results to write: all of them, or none in a skipped step."""
    return tl.where(tl.load(bad) == 0.0, size, 0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rows_kernel(
    gradients, slots, moment, bad, lead, rows, columns, blocks, beta2, rest, eps,
    dtype: tl.constexpr, aligned: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Moving average of each row's mean squared gradient, as in Adafactor. A program handles `high` rows."""
    matrix, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    source = _matrix(gradients, matrix, lead, rows, columns, dtype, aligned)
    r = block * high + tl.arange(0, high)
    total = tl.zeros([high, wide], dtype=tl.float32)
    for start in range(0, columns, wide):
        c = start + tl.arange(0, wide)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        g = tl.load(source + r[:, None] * columns + c[None, :], mask=inside, other=0.0).to(tl.float32)
        total += g * g
    mean = tl.sum(total, axis=1) / columns
    target = moment + _slot(slots, matrix, lead) * rows + r
    before = tl.load(target, mask=r < rows, other=0.0)
    tl.store(target, before * beta2 + (mean + eps) * rest, mask=r < _writable(rows, bad))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _columns_kernel(
    gradients, slots, moment, bad, lead, rows, columns, blocks, beta2, rest, eps,
    dtype: tl.constexpr, aligned: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Moving average of each column's mean squared gradient. A program handles `wide` columns."""
    matrix, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    source = _matrix(gradients, matrix, lead, rows, columns, dtype, aligned)
    c = block * wide + tl.arange(0, wide)
    total = tl.zeros([high, wide], dtype=tl.float32)
    for start in range(0, rows, high):
        r = start + tl.arange(0, high)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        g = tl.load(source + r[:, None] * columns + c[None, :], mask=inside, other=0.0).to(tl.float32)
        total += g * g
    mean = tl.sum(total, axis=0) / rows
    target = moment + _slot(slots, matrix, lead) * columns + c
    before = tl.load(target, mask=c < columns, other=0.0)
    tl.store(target, before * beta2 + (mean + eps) * rest, mask=c < _writable(columns, bad))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _normalized(source, by_row, by_col, matrix, rows, columns, i):
    """The gradient, normalized by its row and column, before clipping."""
    inside = i < rows * columns
    g = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
    row_factor = tl.load(by_row + matrix.to(tl.int64) * rows + i // columns, mask=inside, other=0.0)
    column_factor = tl.load(by_col + matrix.to(tl.int64) * columns + i % columns, mask=inside, other=0.0)
    return g * row_factor * column_factor


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _squares_kernel(
    gradients,
    by_row,
    by_col,
    partial,
    lead,
    rows,
    columns,
    blocks,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    flat: tl.constexpr,
):
    """Sum of squares of one block of normalized gradients."""
    matrix, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    source = _matrix(gradients, matrix, lead, rows, columns, dtype, aligned)
    i = block * flat + tl.arange(0, flat)
    u = _normalized(source, by_row, by_col, matrix, rows, columns, i)
    tl.store(partial + matrix.to(tl.int64) * blocks + block, tl.sum(u * u, axis=0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _move_kernel(
    addresses, gradients, slots, by_row, by_col, damping, bad, stored, signs,
    lead, rows, columns, blocks, unit, bump, lowest, highest, bias, min_lr, max_lr, decay,
    dtype: tl.constexpr, aligned: tl.constexpr, none_yet: tl.constexpr, flat: tl.constexpr,
):  # fmt: skip
    """Adapt each element's learning rate, then apply the update.

    A rate rises by `bump` while the update keeps its sign, and falls by it when the sign changes. Rates are integer
    multiples of `unit`, stored minus `bias`.
    """
    matrix, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i = block * flat + tl.arange(0, flat)
    inside = i < rows * columns
    source = _matrix(gradients, matrix, lead, rows, columns, dtype, aligned)
    u = _normalized(source, by_row, by_col, matrix, rows, columns, i)
    positive = (u > 0).to(tl.int32)

    state = _slot(slots, matrix, lead).to(tl.int64) * rows * columns + i
    last = tl.load(signs + state, mask=inside, other=0).to(tl.int32)
    units = tl.load(stored + state, mask=inside, other=0).to(tl.int32) + bias
    step = tl.where(last == none_yet, 0, tl.where(last == positive, bump, -bump))
    units = tl.minimum(tl.maximum(units + step, lowest), highest)
    kept = i < _writable(rows * columns, bad)
    tl.store(signs + state, positive.to(tl.uint8), mask=kept)
    tl.store(stored + state, (units - bias).to(stored.dtype.element_ty), mask=kept)

    # min_lr and max_lr need not be multiples of `unit`: the first and last level stand for them exactly.
    rate = units.to(tl.float32) * unit
    rate = tl.where(units <= lowest, min_lr, rate)
    rate = tl.where(units >= highest, max_lr, rate)
    index = _matrix(addresses, matrix, lead, rows, columns, dtype, aligned) + i
    p = tl.load(index, mask=inside, other=0.0).to(tl.float32)
    damped = u * tl.load(damping + matrix // lead)
    tl.store(index, (p - (damped + p * decay) * rate).to(dtype), mask=kept)


# -- launching --------------------------------------------------------------------------------------------------------


def _block_size(size: int, most: int) -> int:
    return min(triton.next_power_of_2(size), most)  # type: ignore[no-any-return, unused-ignore]


def average_rows(
    gradients: Tensor, slots: Tensor, moment: Tensor, bad: Tensor, shape: KernelShape, dtype: torch.dtype,
    *, beta2: float, eps: float,
) -> None:  # fmt: skip
    """Update the row moments in `moment` from the gradients."""
    wide = _block_size(shape.columns, 256)
    high = _block_size(shape.rows, max(1, _TILE // wide))
    blocks = triton.cdiv(shape.rows, high)
    _rows_kernel[(shape.matrices * blocks,)](
        gradients, slots, moment, bad, shape.lead, shape.rows, shape.columns, blocks, beta2, 1.0 - beta2, eps,
        dtype=_DTYPES[dtype], aligned=shape.aligned, high=high, wide=wide,
    )  # fmt: skip


def average_columns(
    gradients: Tensor, slots: Tensor, moment: Tensor, bad: Tensor, shape: KernelShape, dtype: torch.dtype,
    *, beta2: float, eps: float,
) -> None:  # fmt: skip
    """Update the column moments in `moment` from the gradients."""
    wide = _block_size(shape.columns, 128)
    high = _block_size(shape.rows, max(1, _TILE // wide))
    blocks = triton.cdiv(shape.columns, wide)
    _columns_kernel[(shape.matrices * blocks,)](
        gradients, slots, moment, bad, shape.lead, shape.rows, shape.columns, blocks, beta2, 1.0 - beta2, eps,
        dtype=_DTYPES[dtype], aligned=shape.aligned, high=high, wide=wide,
    )  # fmt: skip


def square_sums(gradients: Tensor, by_row: Tensor, by_col: Tensor, shape: KernelShape, dtype: torch.dtype) -> Tensor:
    """Partial sums of squares of the normalized gradients, [tensors, lead * blocks]. Sum over the last dimension for
    each tensor."""
    flat = _block_size(shape.rows * shape.columns, _FLAT)
    blocks = triton.cdiv(shape.rows * shape.columns, flat)
    partial = torch.empty((shape.matrices, blocks), dtype=torch.float32, device=gradients.device)
    _squares_kernel[(shape.matrices * blocks,)](
        gradients, by_row, by_col, partial, shape.lead, shape.rows, shape.columns, blocks,
        dtype=_DTYPES[dtype], aligned=shape.aligned, flat=flat,
    )  # fmt: skip
    return partial.reshape(shape.tensors, -1)


def move(
    addresses: Tensor,
    gradients: Tensor,
    slots: Tensor,
    by_row: Tensor,
    by_col: Tensor,
    damping: Tensor,
    bad: Tensor,
    rates: Tensor,
    signs: Tensor,
    shape: KernelShape,
    dtype: torch.dtype,
    *,
    unit: float,
    bump: int,
    lowest: int,
    highest: int,
    bias: int,
    min_lr: float,
    max_lr: float,
    weight_decay: float,
    no_sign: int,
) -> None:
    """Update the parameters, their learning rates and signs in place.

    `rates` are stored as `RateGrid` describes. `no_sign` marks entries of `signs` without an update so far.
    """
    flat = _block_size(shape.rows * shape.columns, _FLAT)
    blocks = triton.cdiv(shape.rows * shape.columns, flat)
    _move_kernel[(shape.matrices * blocks,)](
        addresses, gradients, slots, by_row, by_col, damping, bad, rates, signs,
        shape.lead, shape.rows, shape.columns, blocks, unit, bump, lowest, highest, bias, min_lr, max_lr, weight_decay,
        dtype=_DTYPES[dtype], aligned=shape.aligned, none_yet=no_sign, flat=flat,
    )  # fmt: skip
