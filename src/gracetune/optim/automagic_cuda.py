"""Automagic's step in kernels of its own (Triton, which comes with torch for CUDA): about the traffic of fused AdamW.

Gradients and parameters are read and written where they are, through a table of their addresses: nothing is stacked,
and a step needs no memory to speak of. Four passes over the gradients (means by row, by column, the RMS, the move);
every sum is taken in one order, so two runs give the same bits.
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
_OLDEST = (8, 0)
"""Compute capability that Triton needs for bf16."""


def kernels_for(parameter: Tensor, fused: bool | None) -> bool:
    """Whether our kernels can work on it. Asked for where they cannot: an error."""
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
    """Where some tensors are, on the device; sent anew only when one has moved."""

    known: list[int] = field(default_factory=list)
    table: Tensor | None = None
    aligned: bool = False
    """All of them, for reads of 16 bytes."""

    def of(self, tensors: list[Tensor]) -> Tensor:
        return self.numbers([tensor.data_ptr() for tensor in tensors], tensors[0].device)

    def numbers(self, numbers: list[int], device: torch.device) -> Tensor:
        if self.table is None or numbers != self.known:
            self.known, self.table = numbers, torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
            self.aligned = all(number % _VECTOR == 0 for number in numbers)
        return self.table


@dataclass(eq=False)
class CudaStack(Stack):
    """A stack of parameters of two or more dimensions: `lead` matrices of R x C each."""

    _parameter_addresses: _Addresses = field(default_factory=_Addresses)
    _gradients: _Addresses = field(default_factory=_Addresses)
    _slots: _Addresses = field(default_factory=_Addresses)
    _good: Tensor | None = None
    """A flag that says so: what a step without one is given."""

    @torch.no_grad()
    def step(self, active: list[int], rule: UpdateRule, bad: Tensor | None = None) -> None:
        parameters = [local(self.parameters[at]) for at in active]
        # Kept until the kernels are queued: a contiguous copy must not be freed under them.
        dtype = parameters[0].dtype
        gradients = [
            _plain(local(gradient), dtype) for at in active if (gradient := self.parameters[at].grad) is not None
        ]
        device = parameters[0].device
        # Triton's interpreter runs the same on a CPU, which is how tests without a GPU check it.
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
    """Mostly itself; asked first, because a call that changes nothing still costs its time a thousand times a step."""
    return gradient if gradient.dtype is dtype and gradient.is_contiguous() else gradient.to(dtype).contiguous()


def _is_even(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether all matrices of an aligned tensor are aligned."""
    return len(shape) == 2 or shape[-2] * shape[-1] * dtype.itemsize % _VECTOR == 0
