"""The adapter's output on a linear layer, computed from the factors without materializing the change of the weight.

The input x [..., in] is in the compute precision. The trained factors are fp32. They are cast to the compute precision
once for each call, after the scale was multiplied into the smaller one.

The backward pass needs x, which other layers keep anyway, and tensors of the rank's width. Where autograd would keep
more, an `autograd.Function` saves only what it needs and computes the rest from the gradient. For LoKr, with x as
[n, c, d], the gradient g as [n, a, b], W1 [a, c], W2 [b, d], and M^T for the transpose of the last two dimensions:

    y = W1 x W2^T            for each of the n tokens
    u = g W2, v = W1^T g     dx = W1^T u,  dW1 = sum u x^T,  dW2 = sum v^T x

No product of the forward pass occurs in it, so a compiler that searches both passes for common work keeps none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gracetune import kernels
from gracetune.adapters.computation import Computation
from gracetune.adapters.delta import EPSILON
from gracetune.kernels import use_half_kernels as use_half_kernels
from gracetune.kernels.fused_products import goes_to_rank, is_thin, mixed_and_product, products


def compute_dtype(x: Tensor) -> torch.dtype:
    """The precision in which a linear layer computes for this input: autocast's, or the input's own."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def in_own_precision(x: Tensor) -> AbstractContextManager[object]:
    """Disables autocast for the device of `x`. The meta device has no autocast to disable."""
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)


Scale = float | Tensor
_MIXED_IN_ONE_PASS: Final = 64
"""The longest side of LoKr's W1 that the `lokr_mixing` kernel supports."""


def _scaled(factor: Tensor, scale: Scale) -> Tensor:
    return factor if isinstance(scale, float) and scale == 1.0 else factor * scale


def low_rank(x: Tensor, down: Tensor, up: Tensor, scale: Scale) -> Tensor:
    """scale up (down x), with down [r, in] and up [out, r]."""
    if isinstance(scale, float) and use_half_kernels(x):
        return low_rank_linears(x, [LowRankFactors(down, up, scale)])[0]
    return F.linear(F.linear(x, down.to(x.dtype)), _scaled(up, scale).to(x.dtype))


def can_fuse_with_kernel(x: Tensor, base: nn.Linear) -> bool:
    """Whether a fused kernel can add the base layer's product to the adapter's: the weight is frozen and has the
    precision of `x`."""
    weight = base.weight
    return use_half_kernels(x) and weight.dtype == x.dtype and not weight.requires_grad


@dataclass(frozen=True)
class LowRankFactors:
    """The factors of one layer. With a weight and bias, the base layer's output is computed too and added."""

    down: Tensor
    up: Tensor
    scale: float
    weight: Tensor | None = None
    bias: Tensor | None = None


def low_rank_linears(x: Tensor, layers: Sequence[LowRankFactors]) -> tuple[Tensor, ...]:
    """The outputs of several layers with the same input, which is read once for all of their adapters."""
    rows = x.reshape(-1, x.shape[-1])
    tensors = [(one.weight, one.bias, one.down, one.up) for one in layers]
    results = _LowRankLinears.apply(  # type: ignore[no-untyped-call]
        rows, tuple(one.scale for one in layers), *(tensor for kind in zip(*tensors, strict=True) for tensor in kind)
    )
    return tuple(one.reshape(*x.shape[:-1], one.shape[-1]) for one in results)


class _LowRankLinears(torch.autograd.Function):
    """Several low-rank adapters with one input. The gradients of the factors are sums over all tokens, so their
    products return fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: tuple[float, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors`: all weights, all biases, all down factors, all up factors."""
        weights, biases, downs, ups = _by_kind(tensors, len(scales))
        scaled = [_scaled(one, scale) for one, scale in zip(ups, scales, strict=True)]
        down, ups = _cast_factors(downs, scaled, x.dtype)
        ctx.scales, ctx.ranks = scales, [one.shape[1] for one in ups]
        ctx.based = weights[0] is not None
        with in_own_precision(x):
            narrow = _to_rank(x, down.t())
            ctx.save_for_backward(x, narrow, down, *ups, *(weights if ctx.based else ()))
            return tuple(
                _from_rank(part, up.t(), bias, x, None if weight is None else weight.t())
                for part, up, bias, weight in zip(narrow.split(ctx.ranks, 1), ups, biases, weights, strict=True)
            )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, narrow, down, *others = ctx.saved_tensors
        count = len(ctx.scales)
        ups, weights = others[:count], others[count:]
        with in_own_precision(x):
            backs, d_ups = [], []
            parts = narrow.split(ctx.ranks, 1)
            # This order is for the GPU's L2 cache, which holds about one gradient. The two small products read the same
            # gradient one after the other. dx comes last, because the previous layer's backward pass reads it next.
            for one, up, part, scale in zip(gradients, ups, parts, ctx.scales, strict=True):
                backs.append(_to_rank(one, up))
                d_ups.append(_scaled(_fp32_product(one.t(), part), scale))
            back = _concatenated(backs, dim=1)
            d_downs = _fp32_product(back.t(), x).split(ctx.ranks, 0)
            dx = None
            if ctx.needs_input_grad[0]:
                dx = products(back, down, None, gradients, weights) if ctx.based else _thin_product(back, down)
        return dx, None, *(None for _ in range(2 * count)), *d_downs, *d_ups


def _by_kind(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    return [list(tensors[first : first + count]) for first in range(0, len(tensors), count)]


def _cast_factors(downs: list[Tensor], ups: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Cast the factors: all down factors stacked into one, and the up factors. It takes one cast for all of them,
    because each is so small that its cost is the kernel launch."""
    flat = torch.cat([one.flatten() for one in (*downs, *ups)]).to(dtype)
    down, *parts = flat.split([sum(one.numel() for one in downs), *(one.numel() for one in ups)])
    return down.view(-1, downs[0].shape[1]), [part.view(one.shape) for part, one in zip(parts, ups, strict=True)]


def _concatenated(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _from_rank(narrow: Tensor, up: Tensor, bias: Tensor | None, x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return _thin_product(narrow, up)
    return products(narrow, up, None if bias is None else bias.to(x.dtype), [x], [weight])


def _to_rank(rows: Tensor, factor: Tensor) -> Tensor:
    if goes_to_rank(rows, factor):
        from gracetune.kernels.low_rank import to_rank  # only a GPU has triton

        return cast(Tensor, to_rank(rows, factor))
    return rows.mm(factor)


def _thin_product(left: Tensor, right: Tensor) -> Tensor:
    if is_thin(left):
        from gracetune.kernels.low_rank import thin  # only a GPU has triton

        return cast(Tensor, thin(left, right))
    return left.mm(right)


def _fp32_product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two half-precision matrices, returned in fp32 as the tensor cores accumulate it."""
    if left.device.type != "cuda":  # torch supports `out_dtype` on CUDA only
        return left.float().mm(right.float())
    return torch.mm(left, right, out_dtype=torch.float32)


def product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two small factors, in their own precision in both passes even under autocast."""
    result: Tensor = _Product.apply(left, right)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        with in_own_precision(left):
            return left.mm(right)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        left, right = ctx.saved_tensors
        with in_own_precision(left):  # eager mode runs the backward pass under whatever autocast is active there
            return gradient.mm(right.t()), left.t().mm(gradient)


# -- LoKr -------------------------------------------------------------------------------------------------------------


def kronecker(x: Tensor, w1: Tensor, w2: Tensor, scale: Scale, computation: Computation) -> Tensor:
    """scale (w1 (x) w2) x, with w1 [a, c] and w2 [b, d]."""
    rows = x.reshape(-1, w1.shape[1], w2.shape[1])
    added: Tensor = _Kronecker.apply(rows, _scaled(w1, scale).to(x.dtype), w2.to(x.dtype), computation.w1_first)  # type: ignore[no-untyped-call]
    return added.reshape(*x.shape[:-1], w1.shape[0] * w2.shape[0])


def kronecker_by_rank(x: Tensor, w1: Tensor, up: Tensor, down: Tensor, scale: Scale) -> Tensor:
    """Like `kronecker`, with w2 = up down, up [b, r] and down [r, d]."""
    rows = x.reshape(-1, w1.shape[1], down.shape[1])
    narrow = F.linear(rows, down.to(x.dtype))  # [n, c, r]
    small = _scaled(w1, scale).to(x.dtype)
    mixed = torch.bmm(small.expand(narrow.shape[0], *small.shape), narrow)  # [n, a, r]
    return F.linear(mixed, up.to(x.dtype)).reshape(*x.shape[:-1], w1.shape[0] * up.shape[0])


def _mixed(small: Tensor, rows: Tensor) -> Tensor:
    """small [p, q] times each of rows [n, q, k]. Call it only inside an `autograd.Function`: the kernel has no
    gradient."""
    if kernels.use_kernels(rows) and mixes_in_one_pass(small):
        from gracetune.kernels.lokr_mixing import mixed  # only a GPU has triton

        return cast(Tensor, mixed(small, rows))
    return torch.bmm(small.expand(rows.shape[0], *small.shape), rows)


def mixes_in_one_pass(w1: Tensor) -> bool:
    return max(w1.shape) <= _MIXED_IN_ONE_PASS


def kronecker_linear(x: Tensor, base: nn.Linear, w1: Tensor, w2: Tensor, scale: float) -> Tensor:
    """The base layer's output plus scale (w1 (x) w2) x."""
    rows = x.reshape(-1, x.shape[-1])
    result: Tensor = _KroneckerLinear.apply(rows, base.weight, base.bias, w1, w2, scale)  # type: ignore[no-untyped-call]
    return result.reshape(*x.shape[:-1], result.shape[-1])


class _KroneckerLinear(torch.autograd.Function):
    """Like `_Kronecker` with the product with W2 first. Both gradients of factors are accumulated in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, w1: Tensor, w2: Tensor, scale: float
    ) -> Tensor:  # fmt: skip
        small, large = _scaled(w1, scale).to(x.dtype), w2.to(x.dtype)
        ctx.scale = scale
        ctx.save_for_backward(x, weight, small, large)
        plain = None if bias is None else bias.to(x.dtype)
        with in_own_precision(x):
            rows = F.linear(x.reshape(-1, small.shape[1], large.shape[1]), large)
            return mixed_and_product(small, rows, plain, x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, small, large = ctx.saved_tensors
        (a, c), (b, d) = small.shape, large.shape
        gradient_rows, back = gradient.reshape(-1, a, b), small.t()
        with in_own_precision(x):
            wide = gradient_rows.matmul(large)  # [n, a, d]
            dx = mixed_and_product(back, wide, None, gradient, weight) if ctx.needs_input_grad[0] else None
            dw1 = torch.bmm(wide, x.reshape(-1, c, d).transpose(1, 2)).sum(0, dtype=torch.float32)
            dw2 = _fp32_product(_mixed(back, gradient_rows).reshape(-1, b).t(), x.reshape(-1, d))
        return dx, None, None, _scaled(dw1, ctx.scale), dw2, None


class _Kronecker(torch.autograd.Function):
    """LoKr's change applied to x [n, c, d]. The formulas are in the docstring of this module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, w1_first: bool) -> Tensor:
        ctx.save_for_backward(x, w1, w2)
        with in_own_precision(x):
            if w1_first:
                return F.linear(_mixed(w1, x), w2)
            return _mixed(w1, F.linear(x, w2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w1, w2 = ctx.saved_tensors
        with in_own_precision(x):
            wide = gradient.matmul(w2)  # [n, a, d]
            back = w1.transpose(0, 1)
            dx = _mixed(back, wide) if ctx.needs_input_grad[0] else None
            exact = torch.promote_types(w1.dtype, torch.float32)
            dw1 = torch.bmm(wide, x.transpose(1, 2)).sum(0, dtype=exact).to(w1.dtype)
            dw2 = _mixed(back, gradient).reshape(-1, w2.shape[0]).t().mm(x.reshape(-1, w2.shape[1]))
        return dx, dw1, dw2, None


# -- LoHa -------------------------------------------------------------------------------------------------------------


def hadamard_by_rank(x: Tensor, w1a: Tensor, w1b: Tensor, w2a: Tensor, w2b: Tensor, scale: Scale) -> Tensor:
    """scale ((w1a w1b) * (w2a w2b)) x, with w1a, w2a [out, r] and w1b, w2b [r, in]."""
    rows = x.reshape(-1, x.shape[-1])
    added: Tensor = _HadamardByRank.apply(rows, _scaled(w1a, scale), w1b, w2a, w2b)  # type: ignore[no-untyped-call]
    return added.reshape(*x.shape[:-1], w1a.shape[0])


def _pairs_up(w1a: Tensor, w2a: Tensor, dtype: torch.dtype) -> Tensor:
    """[out, r^2]: every column of w1a times every column of w2a."""
    return (w1a.unsqueeze(2) * w2a.unsqueeze(1)).to(dtype).flatten(1)


def _pairs_down(w1b: Tensor, w2b: Tensor, dtype: torch.dtype) -> Tensor:
    """[r^2, in]: every row of w1b times every row of w2b."""
    return (w1b.unsqueeze(1) * w2b.unsqueeze(0)).to(dtype).flatten(0, 1)


class _HadamardByRank(torch.autograd.Function):
    """(A B) * (C D) as a product of rank r^2: pairs of columns of A and C, times pairs of rows of B and D."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1a: Tensor, w1b: Tensor, w2a: Tensor, w2b: Tensor) -> Tensor:
        with in_own_precision(x):
            narrow = F.linear(x, _pairs_down(w1b, w2b, x.dtype))  # [n, r^2]
            added = F.linear(narrow, _pairs_up(w1a, w2a, x.dtype))
        ctx.save_for_backward(x, narrow, w1a, w1b, w2a, w2b)
        return added

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, narrow, w1a, w1b, w2a, w2b = ctx.saved_tensors
        rank = w1a.shape[1]
        with in_own_precision(x):
            back = gradient.matmul(_pairs_up(w1a, w2a, x.dtype))  # [n, r^2]
            dx = back.matmul(_pairs_down(w1b, w2b, x.dtype)) if ctx.needs_input_grad[0] else None
            up = gradient.t().mm(narrow).to(w1a.dtype).unflatten(1, (rank, rank))  # [out, r, r]
            down = back.t().mm(x).to(w1b.dtype).unflatten(0, (rank, rank))  # [r, r, in]
            dw1a, dw2a = (up * w2a.unsqueeze(1)).sum(2), (up * w1a.unsqueeze(2)).sum(1)
            dw1b, dw2b = (down * w2b.unsqueeze(0)).sum(1), (down * w1b.unsqueeze(1)).sum(0)
        return dx, dw1a, dw1b, dw2a, dw2b


def hadamard_rebuilt(x: Tensor, w1a: Tensor, w1b: Tensor, w2a: Tensor, w2b: Tensor, scale: Scale) -> Tensor:
    """Like `hadamard_by_rank`, but builds the change. It is built again in the backward pass instead of being kept."""
    scaled = _scaled(w1a, scale)
    factors = (scaled, w1b, w2a, w2b)
    return cast(Tensor, checkpoint(_with_change, x, *factors, use_reentrant=False, preserve_rng_state=False))


def _with_change(x: Tensor, w1a: Tensor, w1b: Tensor, w2a: Tensor, w2b: Tensor) -> Tensor:
    return F.linear(x, (product(w1a, w1b) * product(w2a, w2b)).to(x.dtype))


# -- DoRA -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def row_norms(weight: Tensor, squares: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """The row norms [out] of W + scale up down, in fp32. `squares` [out] are the squared row norms of the frozen W.

    By rows, |W|^2 + 2 scale <W, up down> + scale^2 |up down|^2. No term needs a matrix of the weight's size:
    <W, up down> = <W down^T, up> and |up down|^2 = <up (down down^T), up>.
    """
    with in_own_precision(weight):
        down, up = down.detach().float(), up.detach().float()
        across = F.linear(weight, down.to(weight.dtype)).float()  # [out, r]
        own = up @ (down @ down.t())
        squared = squares + ((2 * scale) * across + (scale * scale) * own).mul(up).sum(1)
    # Rounding can make the sum negative if the adapter cancels a row. A row of zeros must not cause a division by 0.
    return squared.clamp_min(0).sqrt().clamp_min(EPSILON)


def apply_magnitude(result: Tensor, bias: Tensor | None, added: Tensor, ratio: Tensor) -> Tensor:
    """DoRA's output ratio (result - bias + added) + bias, where `result` is the base layer's output."""
    output: Tensor = _ApplyMagnitude.apply(result, bias, added, ratio)  # type: ignore[no-untyped-call]
    return output


class _ApplyMagnitude(torch.autograd.Function):
    """Computed in fp32 and rounded once, because bf16 cannot represent how a ratio near 1 differs from 1.

    It keeps one tensor of the output's size. The operations are in place: in eager mode each one would otherwise
    allocate a tensor of twice the output's size.
    """

    @staticmethod
    def forward(ctx: Any, result: Tensor, bias: Tensor | None, added: Tensor, ratio: Tensor) -> Tensor:
        plain = result.to(torch.float32, copy=True)
        if bias is not None:
            plain -= bias
        moved = plain + added
        ctx.save_for_backward(moved.to(result.dtype, copy=True), ratio)
        # Exactly the base layer's result where the ratio is 1 and nothing is added.
        return moved.mul_(ratio).sub_(plain).add_(result).to(result.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        moved, ratio = ctx.saved_tensors
        to_ratio = gradient.to(torch.float32, copy=True).mul_(moved).flatten(0, -2).sum(0)
        to_output = (gradient * ratio).to(gradient.dtype)
        return to_output, None, to_output, to_ratio
