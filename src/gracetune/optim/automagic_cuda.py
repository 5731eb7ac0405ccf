"""Automagic's step in Triton kernels (Triton ships with torch for CUDA), with about the memory traffic of fused AdamW.

The kernels read gradients and write parameters in place, through a table of their addresses. Nothing is stacked, so a
step needs almost no extra memory. There are four passes over the gradients: row means, column means, RMS, update. Every
sum has a fixed order, so two runs give the same bits.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gracetune.adapters.layer import local
from gracetune.optim.automagic_stack import NO_SIGN, TINY, Stack, UpdateRule, sharding_of

if TYPE_CHECKING:
    from types import ModuleType

_VECTOR = 16
"""Bytes of one vectorized load."""
_OLDEST = (8, 0)
"""Lowest compute capability for which Triton supports bf16."""


def kernels_for(parameter: Tensor, fused: bool | None) -> bool:
    """Whether to use the kernels for `parameter`. ValueError if `fused` is True and they cannot run."""
    part = local(parameter)
    can = (
        part.is_cuda
        and part.ndim >= 2
        and part.numel() > 0
        and part.is_contiguous()
        and part.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and sharding_of(parameter) is None
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(part.device) >= _OLDEST
    )
    if fused and not can and part.ndim >= 2 and part.numel() > 0:
        raise ValueError(
            f"fused: needs whole, contiguous parameters on a CUDA GPU of capability {_OLDEST} or newer, and Triton; "
            f"this one is {part.dtype} on {part.device}. Leave `fused` out to take what fits"
        )
    return can and fused is not False


@cache
def _kernels() -> ModuleType:
    from gracetune.kernels import automagic

    return automagic


@dataclass(eq=False)
class _Addresses:
    """A device table of numbers (addresses or indices), uploaded again only when one of them changes."""

    known: list[int] = field(default_factory=list)
    table: Tensor | None = None
    aligned: bool = False
    """Whether every address allows 16-byte loads."""

    def of(self, tensors: list[Tensor]) -> Tensor:
        return self.numbers([tensor.data_ptr() for tensor in tensors], tensors[0].device)

    def numbers(self, numbers: list[int], device: torch.device) -> Tensor:
        if self.table is None or numbers != self.known:
            self.known, self.table = numbers, torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
            self.aligned = all(number % _VECTOR == 0 for number in numbers)
        return self.table


@dataclass(eq=False)
class CudaStack(Stack):
    """A stack of parameters with two or more dimensions, each seen as `lead` matrices of R x C."""

    _parameter_addresses: _Addresses = field(default_factory=_Addresses)
    _gradients: _Addresses = field(default_factory=_Addresses)
    _slots: _Addresses = field(default_factory=_Addresses)
    _good: Tensor | None = None
    """A zero flag on the device, for steps that are called without `bad`."""

    @torch.no_grad()
    def step(self, active: list[int], rule: UpdateRule, bad: Tensor | None = None) -> None:
        parameters = [local(self.parameters[at]) for at in active]
        # The list keeps contiguous copies alive until the kernels are queued.
        dtype = parameters[0].dtype
        gradients = [
            _plain(local(gradient), dtype) for at in active if (gradient := self.parameters[at].grad) is not None
        ]
        device = parameters[0].device
        # Tests run the same code on a CPU with Triton's interpreter.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._launch(parameters, gradients, active, rule, self._flag(bad, device))

    def _flag(self, bad: Tensor | None, device: torch.device) -> Tensor:
        if bad is not None:
            return bad
        if self._good is None:
            self._good = torch.zeros((), device=device)
        return self._good

    def _launch(
        self, parameters: list[Tensor], gradients: list[Tensor], active: list[int], rule: UpdateRule, bad: Tensor
    ) -> None:  # fmt: skip
        device = parameters[0].device
        slots = self._slots.numbers(active, device)
        calls: Any = _kernels()
        addresses, grads = self._parameter_addresses.of(parameters), self._gradients.of(gradients)
        dtype = parameters[0].dtype
        aligned = self._parameter_addresses.aligned and self._gradients.aligned
        shapes = calls.Shape.of(self.shape, len(active), aligned=aligned and _is_even(self.shape, dtype))
        row, col = self.moments["row"], self.moments["col"]
        calls.average_rows(grads, slots, row, bad, shapes, dtype, beta2=rule.beta2, eps=rule.eps)
        calls.average_columns(grads, slots, col, bad, shapes, dtype, beta2=rule.beta2, eps=rule.eps)
        # The kernels read moments by position among the active parameters, so others are selected out first.
        whole = len(active) == len(self.parameters)
        row, col = (row, col) if whole else (row[slots], col[slots])
        by_row = (row / row.mean(-1, keepdim=True)).clamp_(min=TINY).rsqrt_()
        by_col = col.clamp(min=TINY).rsqrt_()
        partial = calls.square_sums(grads, by_row, by_col, shapes, dtype)
        rms = (partial.sum(-1) / self.shape.numel()).sqrt_()
        damping = rms.div_(rule.clip).clamp_(min=1.0).reciprocal_()
        grid = rule.grid
        calls.move(
            addresses, grads, slots, by_row, by_col, damping, bad, self.rates, self.signs, shapes, dtype,
            unit=grid.unit, bump=grid.bump, lowest=grid.lowest, highest=grid.highest, bias=grid.bias,
            min_lr=grid.limits.min_lr, max_lr=grid.limits.max_lr, weight_decay=rule.weight_decay, no_sign=NO_SIGN,
        )  # fmt: skip


def _plain(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient` in `dtype` and contiguous.

    The check comes first: a no-op call per parameter adds up to a slow step.
    """
    return gradient if gradient.dtype is dtype and gradient.is_contiguous() else gradient.to(dtype).contiguous()


def _is_even(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether every matrix of an aligned tensor starts at an aligned address."""
    return len(shape) == 2 or shape[-2] * shape[-1] * dtype.itemsize % _VECTOR == 0
