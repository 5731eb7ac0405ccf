"""Wan's residual and layer norm on a GPU: addition, norm and modulation in one pass over memory per direction.

    h = x + a gate, rounded;  u = (h - mean) rstd,  rstd = 1 / sqrt(mean((h - mean)^2) + eps);  n = u scale + shift
    g = dn scale;  dx = dh + rstd (g - mean(g) - u mean(g u));  da = dx gate

Everything is computed in fp32. The norm is that of the rounded h, as in diffusers. A program handles one row (token)
and holds it in registers, tile by tile, so that the mean is known before the squared deviations are summed.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from gracetune.kernels.fused_rope import read_tile, row_sizes, write_tile


@triton.jit
@no_type_check
def _add_and_norm(
    x, a, gate, scale, shift, h, n, mean, rstd, tokens, eps,
    WIDTH: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    ADDED: tl.constexpr, GATED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One row. SHARED: the whole batch has one scale and shift."""
    row = tl.program_id(0)
    of_batch = (row // tokens).to(tl.int64) * WIDTH
    modulation = 0 if SHARED else of_batch
    first = row.to(tl.int64) * WIDTH
    column = tl.arange(0, TILE)
    held = ()
    total = tl.zeros([TILE], tl.float32)
    for tile in tl.static_range(TILES):
        at = tile * TILE + column
        given = read_tile(x + first, at, WIDTH, TILE, "evict_first")
        if ADDED:
            added = read_tile(a + first, at, WIDTH, TILE, "evict_first").to(tl.float32)
            if GATED:
                added = added * read_tile(gate + of_batch, at, WIDTH, TILE, "evict_last").to(tl.float32)
            given = (given.to(tl.float32) + added).to(x.dtype.element_ty)
        held = held + (given,)  # noqa: RUF005 - triton has no unpacking
        total += given.to(tl.float32)
    middle = tl.sum(total, 0) / WIDTH
    squares = tl.zeros([TILE], tl.float32)
    for tile in tl.static_range(TILES):
        at = tile * TILE + column
        away = held[tile].to(tl.float32) - middle
        if WIDTH % TILE != 0:  # elements beyond the row were read as 0, which deviates from the mean
            away = tl.where(at < WIDTH, away, 0.0)
        squares += away * away
        if ADDED:  # not in the loop before, where a store between the loads would delay them
            write_tile(h + first, at, held[tile], WIDTH, TILE)
    inverse = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    tl.store(mean + row, middle)
    tl.store(rstd + row, inverse)
    for tile in tl.static_range(TILES):
        at = tile * TILE + column
        factors = read_tile(scale + modulation, at, WIDTH, TILE, "evict_last").to(tl.float32)
        offsets = read_tile(shift + modulation, at, WIDTH, TILE, "evict_last").to(tl.float32)
        normalized = (held[tile].to(tl.float32) - middle) * inverse
        write_tile(n + first, at, normalized * factors + offsets, WIDTH, TILE)


@triton.jit
@no_type_check
def _add_and_norm_backward(
    dn, dh, h, mean, rstd, gate, scale, dx, da, tokens,
    WIDTH: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    ADDED: tl.constexpr, GATED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One row. ADDED: h was an output too and has its own gradient."""
    row = tl.program_id(0)
    of_batch = (row // tokens).to(tl.int64) * WIDTH
    modulation = 0 if SHARED else of_batch
    first = row.to(tl.int64) * WIDTH
    column = tl.arange(0, TILE)
    middle = tl.load(mean + row)
    inverse = tl.load(rstd + row)
    held = ()
    gradients = ()
    onto = ()
    total = tl.zeros([TILE], tl.float32)
    along = tl.zeros([TILE], tl.float32)
    for tile in tl.static_range(TILES):
        at = tile * TILE + column
        given = read_tile(h + first, at, WIDTH, TILE, "evict_first")
        factors = read_tile(scale + modulation, at, WIDTH, TILE, "evict_last").to(tl.float32)
        gradient = read_tile(dn + first, at, WIDTH, TILE, "evict_first").to(tl.float32) * factors
        total += gradient  # 0 beyond the row
        along += gradient * ((given.to(tl.float32) - middle) * inverse)
        held = held + (given,)  # noqa: RUF005
        gradients = gradients + (gradient,)  # noqa: RUF005
        if ADDED:
            onto = onto + (read_tile(dh + first, at, WIDTH, TILE, "evict_first"),)  # noqa: RUF005
    level = tl.sum(total, 0) / WIDTH
    share = tl.sum(along, 0) / WIDTH
    for tile in tl.static_range(TILES):
        at = tile * TILE + column
        normalized = (held[tile].to(tl.float32) - middle) * inverse
        result = inverse * (gradients[tile] - level - normalized * share)
        if ADDED:
            result += onto[tile].to(tl.float32)
        write_tile(dx + first, at, result, WIDTH, TILE)
        if GATED:
            factors = read_tile(gate + of_batch, at, WIDTH, TILE, "evict_last").to(tl.float32)
            write_tile(da + first, at, result * factors, WIDTH, TILE)


def _by_batch(gate: Tensor, batch: int) -> Tensor:
    return gate.expand(batch, -1).contiguous()


@triton_op("gracetune::added_normed", mutates_args={})
def _forward(
    x: Tensor, a: Tensor | None, gate: Tensor | None, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """h (empty if nothing is added), n, and the mean and rstd of each row in fp32."""
    batch, tokens, width = x.shape
    x, scale, shift = x.contiguous(), scale.contiguous(), shift.contiguous()
    n, h = x.new_empty(batch, tokens, width), x.new_empty(0 if a is None else x.shape)
    mean, rstd = (x.new_empty(batch * tokens, dtype=torch.float32) for _ in range(2))
    sizes, warps = row_sizes(width)
    kernel: Any = wrap_triton(_add_and_norm)
    kernel[(batch * tokens,)](  # an absent tensor still needs a pointer, which the kernel does not touch
        x, x if a is None else a.contiguous(), scale if gate is None else _by_batch(gate, batch), scale, shift,
        x if a is None else h, n, mean, rstd, tokens, eps, **sizes,
        ADDED=a is not None, GATED=gate is not None, SHARED=scale.shape[0] == 1, num_warps=warps,
    )  # fmt: skip
    return h, n, mean, rstd


@triton_op("gracetune::added_normed_backward", mutates_args={})
def _backward(
    dn: Tensor, dh: Tensor | None, h: Tensor, mean: Tensor, rstd: Tensor, gate: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx, and da (empty without a gate, where da is dx)."""
    batch, tokens, width = h.shape
    dn, h, scale = dn.contiguous(), h.contiguous(), scale.contiguous()
    dx, da = h.new_empty(batch, tokens, width), h.new_empty(0 if gate is None else h.shape)
    sizes, warps = row_sizes(width)
    kernel: Any = wrap_triton(_add_and_norm_backward)
    kernel[(batch * tokens,)](
        dn, dn if dh is None else dh.contiguous(), h, mean, rstd,
        scale if gate is None else _by_batch(gate, batch), scale, dx, h if gate is None else da, tokens, **sizes,
        ADDED=dh is not None, GATED=gate is not None, SHARED=scale.shape[0] == 1, num_warps=warps,
    )  # fmt: skip
    return dx, da


class _AddNorm(torch.autograd.Function):
    """Saves h, two numbers per row, the gate and the scale.

    torch passes zeros for a missing gradient. None is missing here, because the block uses both outputs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, gate: Tensor | None, scale: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        results: tuple[Tensor, Tensor, Tensor, Tensor] = _forward(x, a, gate, scale, shift, eps)
        h, n, mean, rstd = results
        ctx.save_for_backward(h, mean, rstd, gate, scale)
        return h, n

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dn: Tensor) -> Any:
        h, mean, rstd, gate, scale = ctx.saved_tensors  # read once: under checkpointing a second access fails
        results: tuple[Tensor, Tensor] = _backward(dn, dh, h, mean, rstd, gate, scale)
        dx, da = results
        return dx, dx if gate is None else da, None, None, None, None


class _ModulatedNorm(torch.autograd.Function):
    """Saves x, two numbers per row, and the scale. Returns x too, so that the kernel adds both of its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        results: tuple[Tensor, Tensor, Tensor, Tensor] = _forward(x, None, None, scale, shift, eps)
        _h, n, mean, rstd = results
        ctx.save_for_backward(x, mean, rstd, scale)
        return x.view_as(x), n

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dn: Tensor) -> Any:
        x, mean, rstd, scale = ctx.saved_tensors
        results: tuple[Tensor, Tensor] = _backward(dn, dh, x, mean, rstd, None, scale)
        return results[0], None, None, None


def add_norm(
    x: Tensor, a: Tensor, gate: Tensor | None, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """h = x + a gate, and its layer norm times scale plus shift. x and a are [batch, tokens, width].

    The gate is [batch, width] (None: 1); scale and shift are [batch, width] or [1, width]. Only x and a get gradients.
    """
    result: tuple[Tensor, Tensor]
    result = _AddNorm.apply(x, a.to(x.dtype), gate, scale, shift, eps)  # type: ignore[no-untyped-call]
    return result


def modulated_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [batch, tokens, width] itself, and its layer norm times scale plus shift. Use the returned x from here on."""
    result: tuple[Tensor, Tensor] = _ModulatedNorm.apply(x, scale, shift, eps)  # type: ignore[no-untyped-call]
    return result
