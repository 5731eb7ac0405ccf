"""Gradients of one optimizer step: summed over its samples and all ranks, scaled once, clipped, and checked.

A replica keeps the gradients of an expert in one flat buffer. A step therefore ends with one all-reduce and a few
kernels, however many small matrices an adapter has. torch's DistributedDataParallel is not used. Adapters are small, so
there is little communication to overlap, and its hooks would need special cases for accumulation, for the inactive
expert and for layers without a gradient.

FSDP2 reduces the gradients of sharded parameters itself, in every backward pass.

The loss scale of fp16 grows while gradients are finite and shrinks when they are not. It is 1 in bf16 and fp32.
`torch.amp.GradScaler` reads whether gradients overflowed on the host. Here everything stays on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gracetune.adapters.layer import local_shard
from gracetune.checkpoint.state_parts import SavedState
from gracetune.optim.state_chunks import GradientSums

Reduce = Callable[[Tensor], None]
"""Sums a tensor over all ranks, in place."""
SMALL: Final = 1 << 20
"""Elements up to which adding a tensor takes hardly longer than launching the kernel."""


Accumulation = Literal["mean", "sum"]


def gradient_factor(accumulation: Accumulation, *, micro_batches: int, samples: int) -> float:
    """The factor of the sum of all samples' gradients.

    `mean` gives the mean over the samples. `sum` gives the sum of the micro-batches' means, for micro-batches of equal
    size.
    """
    return (micro_batches if accumulation == "sum" else 1) / samples


@dataclass(frozen=True)
class GradientClipping:
    kind: Literal["norm", "value"] = "norm"
    limit: float | None = 1.0
    """None: gradients are not clipped."""


class Gradients(Protocol):
    """Collects one expert's gradients during an optimizer step."""

    def open(self) -> None:
        """Set all gradients to 0, at the beginning of a step."""

    def collect(self) -> None:
        """Take up the gradients of a backward pass."""

    def finish(self, factor: float | Tensor, clip: GradientClipping) -> Tensor:
        """Reduce over all ranks, multiply by `factor`, and clip.

        Return the norm before clipping as a scalar on the device, equal on all ranks. If the norm is not finite, all
        gradients are set to 0, so that no NaN reaches the weights.
        """

    def close(self) -> None:
        """Set `grad` of all parameters to None, after the optimizer step."""


class FlatGradients:
    """Gradients of parameters that every rank holds completely, in one flat buffer.

    Autograd adds the gradients of large parameters into the buffer itself. It leaves those of small parameters where
    the backward pass put them, and `collect` adds all of them with a few kernels: an adapter has hundreds.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], reduce: Reduce | None = None, *, small: int = SMALL
    ) -> None:
        every = list(parameters.values())
        devices = {parameter.device for parameter in every}
        if len(devices) != 1 or any(parameter.dtype != torch.float32 for parameter in every):
            raise ValueError(f"trained parameters in float32 on one device, not on {devices}")
        sizes = [parameter.numel() for parameter in every]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float32, device=devices.pop())
        parts = self._flat.split(sizes)
        self._slots = [(one, part.view(one.shape)) for one, part in zip(every, parts, strict=True)]
        self._small = [(one, slot) for one, slot in self._slots if one.numel() <= small]
        self._reduce = reduce

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [one for one, _ in self._slots]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add a gradient or None for each of `parameters`. A captured backward pass calls this instead of autograd."""
        _add([(slot, one) for (_, slot), one in zip(self._slots, gradients, strict=True)])

    def open(self) -> None:
        self._flat.zero_()
        for parameter, slot in self._slots:
            parameter.grad = slot
        for parameter, _ in self._small:
            parameter.grad = None

    def collect(self) -> None:
        _add([(slot, one.grad) for one, slot in self._small])
        for parameter, _ in self._small:
            parameter.grad = None

    def finish(self, factor: float | Tensor, clip: GradientClipping) -> Tensor:
        self.collect()
        for parameter, slot in self._slots:
            parameter.grad = slot
        flat = self._flat
        if self._reduce is not None:
            self._reduce(flat)
        norm: Tensor = torch.linalg.vector_norm(flat) * factor
        if clip.limit is not None and clip.kind == "norm":
            factor = factor * _coefficient(norm, clip.limit)
        # If the norm is not finite, multiply by 0. Finite gradients become 0, infinite ones and NaN become NaN, which
        # `nan_to_num_` sets to 0. (A product with a scalar on the device, or `torch.where`, takes twice as long.)
        factor = torch.where(norm.isfinite(), factor, 0.0)
        torch._foreach_mul_([flat], factor)
        flat.nan_to_num_(0.0)
        if clip.limit is not None and clip.kind == "value":
            flat.clamp_(-clip.limit, clip.limit)
        return norm

    def close(self) -> None:
        for parameter, _ in self._slots:
            parameter.grad = None


class SummedGradients:
    """fp32 sums of the gradients of 16-bit weights, for an optimizer that keeps its state in chunks.

    Autograd makes each gradient in the weight's dtype. It is added to the sum and freed at once. Scaling and clipping
    are left to the update, which divides by one number on the device.
    """

    def __init__(
        self, sums: GradientSums, reduce: Reduce | None = None, *, load_ahead: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        """`load_ahead` starts copying states to the device, beside the step that begins."""
        self._sums, self._reduce, self._load_ahead = sums, reduce, load_ahead
        self._open = False
        known = weakref.ref(self)
        for parameter in sums.parameters:
            parameter.register_post_accumulate_grad_hook(partial(_add_to, known))

    def add_gradient(self, parameter: Tensor) -> None:
        if self._open and parameter.grad is not None:
            self._sums.add(parameter, parameter.grad)
            parameter.grad = None

    def open(self) -> None:
        self._sums.clear()
        self._open = True
        self._load_ahead()

    def collect(self) -> None:
        """Do nothing: the hooks have added the gradients."""

    def finish(self, factor: float | Tensor, clip: GradientClipping) -> Tensor:
        sums = self._sums.sums
        if self._reduce is not None:
            for one in sums:
                self._reduce(one)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(sums))) * factor
        if clip.limit is not None and clip.kind == "norm":
            factor = factor * _coefficient(norm, clip.limit)
        elif clip.limit is not None:
            torch._foreach_mul_(sums, factor)
            for one in sums:
                one.clamp_(-clip.limit, clip.limit)
            factor = 1.0
        if isinstance(factor, Tensor):
            self._sums.divisor.copy_(factor.reciprocal())
        else:
            self._sums.divisor.fill_(1.0 / factor)
        return norm

    def close(self) -> None:
        self._sums.clear()  # the gradients of a step that was abandoned: no later step may take them
        self._open = False


def _add_to(known: weakref.ref[SummedGradients], parameter: Tensor) -> None:
    """Takes a weak reference: Python's garbage collector does not see hooks of parameters, so a hook that held the sums
    would keep them and the parameters alive for ever."""
    sums: SummedGradients | None = known()
    if sums is not None:
        sums.add_gradient(parameter)


class ShardedGradients:
    """Gradients of parameters that FSDP2 has sharded: each rank holds its shard of the mean over the ranks."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], world_size: int) -> None:
        self._parameters = list(parameters.values())
        self._world_size = world_size

    def open(self) -> None:
        self.close()

    def collect(self) -> None:
        """Do nothing: FSDP2 has added the gradients."""

    def finish(self, factor: float | Tensor, clip: GradientClipping) -> Tensor:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        parts = [local_shard(gradient) for gradient in gradients]
        # FSDP2 takes the mean over the ranks; our losses are sums.
        torch._foreach_mul_(parts, factor * self._world_size)
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if clip.limit is not None and clip.kind == "norm":
            torch._foreach_mul_(parts, _coefficient(norm, clip.limit))
        elif clip.limit is not None:
            for part in parts:
                part.clamp_(-clip.limit, clip.limit)
        for part in parts:
            part.copy_(torch.where(norm.isfinite(), part, 0.0))
        return norm

    def close(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _add(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Add each gradient that exists to its slot, with a few kernels for all of them."""
    found = [(slot, one) for slot, one in pairs if one is not None]
    if found:
        torch._foreach_add_([slot for slot, _ in found], [one for _, one in found])


def _coefficient(norm: Tensor, limit: float) -> Tensor:
    """The clipping factor, as in torch's `clip_grad_norm_`."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


# -- loss scale --------------------------------------------------------------------------------------------------------


GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000
"""The defaults of `torch.amp.GradScaler`. The interval is in steps with finite gradients."""


class LossScale:
    name = "loss_scale"

    def __init__(self, device: torch.device, *, first: float = 2.0**16) -> None:
        self._scale = torch.full((), first, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def skips(self) -> bool:
        """Whether a step with non-finite gradients is skipped as an ordinary event."""
        return True

    @property
    def factor(self) -> float | Tensor:
        """What gradients are multiplied by to remove the scale."""
        return self._scale.reciprocal()

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    def update(self, norm: Tensor) -> None:
        found = (~norm.isfinite()).float()
        torch._amp_update_scale_(self._scale, self._growth, found, GROWTH, BACKOFF, INTERVAL)

    def save(self) -> SavedState:
        return SavedState({"version": 1}, {"scale": self._scale, "growth": self._growth})

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._scale.copy_(tensors["scale"])
        self._growth.copy_(tensors["growth"])


class NoScale:
    """The scale of bf16 and fp32: always 1."""

    skips = False
    factor = 1.0

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def update(self, norm: Tensor) -> None: ...
