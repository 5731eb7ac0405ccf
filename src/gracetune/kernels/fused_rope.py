"""Fused norm and RoPE for Wan's queries and keys on a GPU, in one pass over memory per direction.

    n = x rstd weight,  rstd = 1 / sqrt(mean(x^2) + eps);  y: each pair (a, b) of n as (a c - b s, b c + a s)
    dn: each pair (a, b) of dy as (a c + b s, b c - a s);  dh = dn weight, h = x rstd;  dx = rstd (dh - h mean(dh h))

Everything is computed in fp32 and rounded once. A program handles one row (token) and holds it in registers, tile by
tile, between the row's sum and its result. Tiles are needed because a width such as 5120 is not a power of two, which
triton requires.
"""

from __future__ import annotations

from typing import Any, Final, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

_LEAST_TILE: Final = 256
"""If only smaller tiles divide the width, larger ones with a mask are faster."""
_MOST_TILE: Final = 2048
_BY_WARP: Final = 256
"""Elements of a tile per warp: 8 per thread, which in bf16 are one 16-byte access."""
_MOST_WARPS: Final = 8


@triton.jit
@no_type_check
def read_tile(row, at, WIDTH: tl.constexpr, TILE: tl.constexpr, POLICY: tl.constexpr):
    """Load a tile of a row. POLICY makes the cache keep data that all rows read and drop the rest."""
    if WIDTH % TILE == 0:
        values = tl.load(row + at, eviction_policy=POLICY)
    else:
        values = tl.load(row + at, mask=at < WIDTH, other=0.0, eviction_policy=POLICY)
    return values


@triton.jit
@no_type_check
def write_tile(row, at, values, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Store a tile of a row."""
    if WIDTH % TILE == 0:
        tl.store(row + at, values.to(row.dtype.element_ty))
    else:
        tl.store(row + at, values.to(row.dtype.element_ty), mask=at < WIDTH)


@triton.jit
@no_type_check
def _angles(cos, sin, at, HEAD: tl.constexpr, TILE: tl.constexpr):
    """Cosine and sine of each pair of a tile. The tables store each angle twice; reading all of it is contiguous."""
    within = at % HEAD
    even, _odd = tl.split(tl.reshape(tl.load(cos + within), [TILE // 2, 2]))
    _even, odd = tl.split(tl.reshape(tl.load(sin + within), [TILE // 2, 2]))
    return even, odd


@triton.jit
@no_type_check
def _rotate(values, c, s, TILE: tl.constexpr):
    a, b = tl.split(tl.reshape(values, [TILE // 2, 2]))
    return tl.reshape(tl.join(a * c - b * s, b * c + a * s), [TILE])


@triton.jit
@no_type_check
def _norm_and_rope(
    x, weight, cos, sin, out, rstd, angles, eps,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0)
    token = (row % angles).to(tl.int64)  # the angles are shared by the batch, or there is one set per row
    first = row.to(tl.int64) * WIDTH
    column = tl.arange(0, TILE)
    held = ()
    squares = tl.zeros([TILE], tl.float32)
    for tile in tl.static_range(TILES):
        given = read_tile(x + first, tile * TILE + column, WIDTH, TILE, "evict_first")
        held = held + (given,)  # noqa: RUF005 - triton has no unpacking
        squares += given.to(tl.float32) * given.to(tl.float32)
    if HEAD > 0:
        c, s = _angles(cos + token * HEAD, sin + token * HEAD, column, HEAD, TILE)
    scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    tl.store(rstd + row, scale)
    for tile in tl.static_range(TILES):
        at = tile * TILE + column
        factors = read_tile(weight, at, WIDTH, TILE, "evict_last").to(tl.float32)
        normalized = held[tile].to(tl.float32) * scale * factors
        if HEAD > 0:
            if TILE % HEAD != 0:  # otherwise all tiles use the same angles
                c, s = _angles(cos + token * HEAD, sin + token * HEAD, at, HEAD, TILE)
            normalized = _rotate(normalized, c, s, TILE)
        write_tile(out + first, at, normalized, WIDTH, TILE)


@triton.jit
@no_type_check
def _norm_and_rope_backward(
    dy, x, weight, cos, sin, rstd, dx, angles,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0)
    token = (row % angles).to(tl.int64)
    first = row.to(tl.int64) * WIDTH
    column = tl.arange(0, TILE)
    scale = tl.load(rstd + row)
    if HEAD > 0:
        c, s = _angles(cos + token * HEAD, sin + token * HEAD, column, HEAD, TILE)
    held = ()
    gradients = ()
    along = tl.zeros([TILE], tl.float32)
    for tile in tl.static_range(TILES):
        at = tile * TILE + column
        given = read_tile(x + first, at, WIDTH, TILE, "evict_first")
        gradient = read_tile(dy + first, at, WIDTH, TILE, "evict_first").to(tl.float32)
        if HEAD > 0:
            if TILE % HEAD != 0:
                c, s = _angles(cos + token * HEAD, sin + token * HEAD, at, HEAD, TILE)
            gradient = _rotate(gradient, c, -s, TILE)
        gradient *= read_tile(weight, at, WIDTH, TILE, "evict_last").to(tl.float32)
        along += gradient * (given.to(tl.float32) * scale)
        held = held + (given,)  # noqa: RUF005
        gradients = gradients + (gradient,)  # noqa: RUF005
    share = tl.sum(along, 0) / WIDTH
    for tile in tl.static_range(TILES):
        result = scale * (gradients[tile] - (held[tile].to(tl.float32) * scale) * share)
        write_tile(dx + first, tile * TILE + column, result, WIDTH, TILE)


def row_sizes(width: int) -> tuple[dict[str, int], int]:
    """A kernel's tile sizes for rows of this width, and the number of warps per row."""
    tile = min(width & -width, _MOST_TILE)
    if tile < _LEAST_TILE:
        tile = min(triton.next_power_of_2(width), _MOST_TILE)
    sizes = {"WIDTH": width, "TILE": tile, "TILES": triton.cdiv(width, tile)}
    return sizes, min(max(tile // _BY_WARP, 1), _MOST_WARPS)


@triton_op("gracetune::normed_turned", mutates_args={})
def _forward(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and rstd of each row in fp32."""
    batch, tokens, width = x.shape
    x, weight = x.contiguous(), weight.contiguous()
    out, rstd = x.new_empty(batch, tokens, width), x.new_empty(batch * tokens, dtype=torch.float32)
    tables, rows, head = _angle_tables(cos, sin, weight)
    sizes, warps = row_sizes(width)
    kernel: Any = wrap_triton(_norm_and_rope)
    kernel[(batch * tokens,)](x, weight, *tables, out, rstd, rows, eps, **sizes, HEAD=head, num_warps=warps)
    return out, rstd


@triton_op("gracetune::normed_turned_backward", mutates_args={})
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor | None, sin: Tensor | None, rstd: Tensor
) -> Tensor:  # fmt: skip
    batch, tokens, width = x.shape
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    dx = x.new_empty(batch, tokens, width)
    tables, rows, head = _angle_tables(cos, sin, weight)
    sizes, warps = row_sizes(width)
    kernel: Any = wrap_triton(_norm_and_rope_backward)
    kernel[(batch * tokens,)](dy, x, weight, *tables, rstd, dx, rows, **sizes, HEAD=head, num_warps=warps)
    return dx


def _angle_tables(cos: Tensor | None, sin: Tensor | None, unread: Tensor) -> tuple[tuple[Tensor, Tensor], int, int]:
    """The tables, their number of rows, and their number of channels: 0 without RoPE. Then `unread` stands in, because
    the kernel needs pointers."""
    if cos is None or sin is None:
        return (unread, unread), 1, 0
    return (cos.contiguous(), sin.contiguous()), cos.shape[0] * cos.shape[1], cos.shape[-1]


class _NormRope(torch.autograd.Function):
    """Saves x and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        results: tuple[Tensor, Tensor] = _forward(x, weight, eps, cos, sin)
        out, rstd = results
        ctx.save_for_backward(x, weight, cos, sin, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _backward(gradient, *ctx.saved_tensors), None, None, None, None


def norm_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """RMS norm of x [batch, tokens, width] with a weight [width], then RoPE by cos and sin, [1, tokens, 1, head] or
    [batch, tokens, 1, head].

    The width is a multiple of the head size. Only x gets a gradient: the weight is frozen. Without cos and sin only the
    norm is computed.
    """
    result: Tensor = _NormRope.apply(x, weight, eps, cos, sin)  # type: ignore[no-untyped-call]
    return result
