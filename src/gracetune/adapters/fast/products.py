"""What an adapter adds to a linear layer's output, without the change of its weight in memory.

x [..., in] is in the precision of the computation; the trained factors are fp32 and are rounded to that precision once
for each call, with the scale multiplied into the smaller one before. What the backward pass needs is x, which the base
layer's neighbours keep anyway, and tensors of the rank's width; where autograd would keep more, a Function says what is
kept and gets the rest from the gradient's side:

    y = (W1 (x) W2) x        with x as [n, c, d], the gradient g as [n, a, b], W1 [a, c], W2 [b, d]:
    u = g W2, v = W1' g      dx = W1' u,  dW1 = sum u x',  dW2 = sum v' x    (no product of the forward pass is needed)

So a compiler that looks for common work in both passes finds none to keep.
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
    """What a linear layer computes in for this input: autocast's precision, or the input's own."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def as_given(x: Tensor) -> AbstractContextManager[object]:
    """Inside, everything is computed in the precision its operands have; on meta there is no autocast to turn off."""
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)


Scale = float | Tensor
_MIXED_IN_ONE_PASS: Final = 64
"""The largest side LoKr's W1 may have for our own kernel."""


def _scaled(factor: Tensor, scale: Scale) -> Tensor:
    return factor if isinstance(scale, float) and scale == 1.0 else factor * scale


def low_rank(x: Tensor, down: Tensor, up: Tensor, scale: Scale) -> Tensor:
    """scale up (down x), with down [r, in] and up [out, r]."""
    if isinstance(scale, float) and use_half_kernels(x):
        return low_rank_linears(x, [LowRankFactors(down, up, scale)])[0]
    return F.linear(F.linear(x, down.to(x.dtype)), _scaled(up, scale).to(x.dtype))


def can_be_added_to(x: Tensor, base: nn.Linear) -> bool:
    """Whether the base layer's product can be added to the adapter's: frozen, and in the computation's precision."""
    weight = base.weight
    return use_half_kernels(x) and weight.dtype == x.dtype and not weight.requires_grad


@dataclass(frozen=True)
class LowRankFactors:
    """Of one layer: its factors, and the frozen weight and bias whose answer is wanted with what the adapter adds."""

    down: Tensor
    up: Tensor
    scale: float
    weight: Tensor | None = None
    bias: Tensor | None = None


def low_rank_linears(x: Tensor, layers: Sequence[LowRankFactors]) -> tuple[Tensor, ...]:
    """The answers of layers with the same input, which is read once for all of their adapters."""
    rows = x.reshape(-1, x.shape[-1])
    tensors = [(one.weight, one.bias, one.down, one.up) for one in layers]
    results = _LowRankLinears.apply(  # type: ignore[no-untyped-call]
        rows, tuple(one.scale for one in layers), *(tensor for kind in zip(*tensors, strict=True) for tensor in kind)
    )
    return tuple(one.reshape(*x.shape[:-1], one.shape[-1]) for one in results)


class _LowRankLinears(torch.autograd.Function):
    """Gradients of the factors leave their products in fp32: sums over all tokens lose nothing to rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: tuple[float, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors`: all weights, all biases, all down factors, all up factors."""
        weights, biases, downs, ups = _by_kind(tensors, len(scales))
        scaled = [_scaled(one, scale) for one, scale in zip(ups, scales, strict=True)]
        down, ups = _rounded(downs, scaled, x.dtype)
        ctx.scales, ctx.ranks = scales, [one.shape[1] for one in ups]
        ctx.based = weights[0] is not None
        with as_given(x):
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
        with as_given(x):
            backs, d_ups = [], []
            parts = narrow.split(ctx.ranks, 1)
            # In this order, because a GPU's cache holds about one gradient: both small products read it, one after the
            # other, and dx is made last, for whoever reads that next.
            for one, up, part, scale in zip(gradients, ups, parts, ctx.scales, strict=True):
                backs.append(_to_rank(one, up))
                d_ups.append(_scaled(_unrounded(one.t(), part), scale))
            back = _joined(backs, dim=1)
            d_downs = _unrounded(back.t(), x).split(ctx.ranks, 0)
            dx = None
            if ctx.needs_input_grad[0]:
                dx = products(back, down, None, gradients, weights) if ctx.based else _thin_product(back, down)
        return dx, None, *(None for _ in range(2 * count)), *d_downs, *d_ups


def _by_kind(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    return [list(tensors[first : first + count]) for first in range(0, len(tensors), count)]


def _rounded(downs: list[Tensor], ups: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """All down factors as one, and the up factors; in one pass, since each is so small that it only costs a launch."""
    flat = torch.cat([one.flatten() for one in (*downs, *ups)]).to(dtype)
    down, *parts = flat.split([sum(one.numel() for one in downs), *(one.numel() for one in ups)])
    return down.view(-1, downs[0].shape[1]), [part.view(one.shape) for part, one in zip(parts, ups, strict=True)]


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
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


def _unrounded(left: Tensor, right: Tensor) -> Tensor:
    """A product of halves as the matrix units add it up, in fp32."""
    if left.device.type != "cuda":  # torch has this for GPUs only
        return left.float().mm(right.float())
    return torch.mm(left, right, out_dtype=torch.float32)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Of two small factors, in their own precision in both passes, whatever autocast says."""
    result: Tensor = _Product.apply(left, right)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        with as_given(left):
            return left.mm(right)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        left, right = ctx.saved_tensors
        with as_given(left):  # a compiled one has that of the forward pass
            return gradient.mm(right.t()), left.t().mm(gradient)


# -- LoKr -------------------------------------------------------------------------------------------------------------


def kronecker(x: Tensor, w1: Tensor, w2: Tensor, scale: Scale, computation: Computation) -> Tensor:
    """scale (w1 (x) w2) x, with w1 [a, c] and w2 [b, d]."""
    rows = x.reshape(-1, w1.shape[1], w2.shape[1])
    added: Tensor = _Kronecker.apply(rows, _scaled(w1, scale).to(x.dtype), w2.to(x.dtype), computation.w1_first)  # type: ignore[no-untyped-call]
    return added.reshape(*x.shape[:-1], w1.shape[0] * w2.shape[0])


def kronecker_by_rank(x: Tensor, w1: Tensor, up: Tensor, down: Tensor, scale: Scale) -> Tensor:
    """The same with w2 = up down, up [b, r] and down [r, d]."""
    rows = x.reshape(-1, w1.shape[1], down.shape[1])
    narrow = F.linear(rows, down.to(x.dtype))  # [n, c, r]
    small = _scaled(w1, scale).to(x.dtype)
    mixed = torch.bmm(small.expand(narrow.shape[0], *small.shape), narrow)  # [n, a, r]
    return F.linear(mixed, up.to(x.dtype)).reshape(*x.shape[:-1], w1.shape[0] * up.shape[0])


def _mixed(small: Tensor, rows: Tensor) -> Tensor:
    """small [p, q] on each of rows [n, q, k], where gradients are somebody else's: our kernel has none."""
    if kernels.pay(rows) and mixes_in_one_pass(small):
        from gracetune.kernels.lokr_mixing import mixed  # only a GPU has triton

        return cast(Tensor, mixed(small, rows))
    return torch.bmm(small.expand(rows.shape[0], *small.shape), rows)


def mixes_in_one_pass(w1: Tensor) -> bool:
    return max(w1.shape) <= _MIXED_IN_ONE_PASS


def kronecker_linear(x: Tensor, base: nn.Linear, w1: Tensor, w2: Tensor, scale: float) -> Tensor:
    """The base layer's answer with scale (w1 (x) w2) x added to it."""
    rows = x.reshape(-1, x.shape[-1])
    result: Tensor = _KroneckerLinear.apply(rows, base.weight, base.bias, w1, w2, scale)  # type: ignore[no-untyped-call]
    return result.reshape(*x.shape[:-1], result.shape[-1])


class _KroneckerLinear(torch.autograd.Function):
    """As `_Kronecker`, W2 first; the gradient of W2 leaves its product in fp32, that of W1 is summed in it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, w1: Tensor, w2: Tensor, scale: float
    ) -> Tensor:  # fmt: skip
        small, large = _scaled(w1, scale).to(x.dtype), w2.to(x.dtype)
        ctx.scale = scale
        ctx.save_for_backward(x, weight, small, large)
        plain = None if bias is None else bias.to(x.dtype)
        with as_given(x):
            rows = F.linear(x.reshape(-1, small.shape[1], large.shape[1]), large)
            return mixed_and_product(small, rows, plain, x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, small, large = ctx.saved_tensors
        (a, c), (b, d) = small.shape, large.shape
        given, back = gradient.reshape(-1, a, b), small.t()
        with as_given(x):
            wide = given.matmul(large)  # [n, a, d]
            dx = mixed_and_product(back, wide, None, gradient, weight) if ctx.needs_input_grad[0] else None
            dw1 = torch.bmm(wide, x.reshape(-1, c, d).transpose(1, 2)).sum(0, dtype=torch.float32)
            dw2 = _unrounded(_mixed(back, given).reshape(-1, b).t(), x.reshape(-1, d))
        return dx, None, None, _scaled(dw1, ctx.scale), dw2, None


class _Kronecker(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, w1_first: bool) -> Tensor:
        ctx.save_for_backward(x, w1, w2)
        with as_given(x):
            if w1_first:
                return F.linear(_mixed(w1, x), w2)
            return _mixed(w1, F.linear(x, w2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w1, w2 = ctx.saved_tensors
        with as_given(x):
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
    """[out, r^2]: each column of the one times each of the other."""
    return (w1a.unsqueeze(2) * w2a.unsqueeze(1)).to(dtype).flatten(1)


def _pairs_down(w1b: Tensor, w2b: Tensor, dtype: torch.dtype) -> Tensor:
    """[r^2, in], likewise by rows."""
    return (w1b.unsqueeze(1) * w2b.unsqueeze(0)).to(dtype).flatten(0, 1)


class _HadamardByRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1a: Tensor, w1b: Tensor, w2a: Tensor, w2b: Tensor) -> Tensor:
        with as_given(x):
            narrow = F.linear(x, _pairs_down(w1b, w2b, x.dtype))  # [n, r^2]
            added = F.linear(narrow, _pairs_up(w1a, w2a, x.dtype))
        ctx.save_for_backward(x, narrow, w1a, w1b, w2a, w2b)
        return added

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, narrow, w1a, w1b, w2a, w2b = ctx.saved_tensors
        rank = w1a.shape[1]
        with as_given(x):
            back = gradient.matmul(_pairs_up(w1a, w2a, x.dtype))  # [n, r^2]
            dx = back.matmul(_pairs_down(w1b, w2b, x.dtype)) if ctx.needs_input_grad[0] else None
            up = gradient.t().mm(narrow).to(w1a.dtype).unflatten(1, (rank, rank))  # [out, r, r]
            down = back.t().mm(x).to(w1b.dtype).unflatten(0, (rank, rank))  # [r, r, in]
            dw1a, dw2a = (up * w2a.unsqueeze(1)).sum(2), (up * w1a.unsqueeze(2)).sum(1)
            dw1b, dw2b = (down * w2b.unsqueeze(0)).sum(1), (down * w1b.unsqueeze(1)).sum(0)
        return dx, dw1a, dw1b, dw2a, dw2b


def hadamard_rebuilt(x: Tensor, w1a: Tensor, w1b: Tensor, w2a: Tensor, w2b: Tensor, scale: Scale) -> Tensor:
    """The same by building the change; it is built again for the backward pass, and not kept until then."""
    scaled = _scaled(w1a, scale)
    factors = (scaled, w1b, w2a, w2b)
    return cast(Tensor, checkpoint(_with_change, x, *factors, use_reentrant=False, preserve_rng_state=False))


def _with_change(x: Tensor, w1a: Tensor, w1b: Tensor, w2a: Tensor, w2b: Tensor) -> Tensor:
    return F.linear(x, (product(w1a, w1b) * product(w2a, w2b)).to(x.dtype))


# -- DoRA -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def row_norms(weight: Tensor, squares: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """|W + scale up down| by rows, in fp32; `squares` are those of W, which does not change.

    |W|^2 + 2 scale <W, up down> + scale^2 |up down|^2, each by rows and through the rank's width.
    """
    with as_given(weight):
        down, up = down.detach().float(), up.detach().float()
        across = F.linear(weight, down.to(weight.dtype)).float()  # [out, r]
        own = up @ (down @ down.t())
        squared = squares + ((2 * scale) * across + (scale * scale) * own).mul(up).sum(1)
    # Rounding may leave less than nothing where the adapter has cancelled a row; one of zeros must not divide by 0.
    return squared.clamp_min(0).sqrt().clamp_min(EPSILON)


def magnified(result: Tensor, bias: Tensor | None, added: Tensor, ratio: Tensor) -> Tensor:
    """From the base layer's `result` to ratio (result - bias + added) + bias."""
    output: Tensor = _Magnified.apply(result, bias, added, ratio)  # type: ignore[no-untyped-call]
    return output


class _Magnified(torch.autograd.Function):
    """In fp32 and rounded once: a ratio near 1 has its digits where bf16 has none. Keeps one tensor of the output's.

    In place, because uncompiled each of these would be a tensor twice the output's size.
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
        to_both = (gradient * ratio).to(gradient.dtype)
        return to_both, None, to_both, to_ratio
