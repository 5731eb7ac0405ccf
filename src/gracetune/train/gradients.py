"""Gradients of a window: summed over its samples and over all ranks, scaled once, clipped, and checked.

A replica's gradients end up in one flat buffer for each expert. So a window ends with one all-reduce and a handful
of kernels, however many small matrices an adapter has. torch's DistributedDataParallel is not used: adapters are small
beside their model, one reduction at the window's end is all there is to overlap, and its hooks would have to be told
about accumulation, about experts whose turn it is not, and about layers without a gradient.

Sharded parameters (FSDP2) reduce their gradients themselves, in every backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gracetune.adapters.layer import local

Reduce = Callable[[Tensor], None]
"""Sums a tensor over all ranks, in place."""
SMALL: Final = 1 << 20
"""Elements up to which an addition is mostly the launch of its kernel."""


Accumulation = Literal["mean", "sum"]


def gradient_factor(accumulation: Accumulation, *, micro_batches: int, samples: int) -> float:
    """What the sum of all samples' gradients is multiplied by, to become the mean of the samples or the sum of the
    micro-batches' means (for micro-batches of one size)."""
    return (micro_batches if accumulation == "sum" else 1) / samples


@dataclass(frozen=True)
class GradientClipping:
    kind: Literal["norm", "value"] = "norm"
    limit: float | None = 1.0
    """None: gradients are taken as they are."""


class Gradients(Protocol):
    def open(self) -> None:
        """A window begins: gradients are 0."""

    def collect(self) -> None:
        """A backward pass is done."""

    def finish(self, factor: float | Tensor, clip: GradientClipping) -> Tensor:
        """Reduce, multiply by `factor`, clip. The norm before clipping, on the device, and the same on every rank.

        Where that is not finite all gradients have become 0: nothing that is not a number reaches the weights.
        """

    def close(self) -> None:
        """The optimizer has stepped: until the next window these parameters have no gradient at all."""


class FlatGradients:
    """Of parameters every rank has whole.

    Autograd adds a large one's gradient in its place. Those of small ones it leaves where the backward pass put them,
    and they are added in a few kernels for all: an adapter has hundreds.
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
        """One for each of `parameters`, None where it has none: what a backward pass does that is no autograd's own."""
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
        # Finite ones times 0 are 0; what is left is what was infinite or no number, and times 0 is none. (torch's other
        # ways, a product with a scalar on the device and `location`, take twice the time for so many.)
        factor = torch.where(norm.isfinite(), factor, 0.0)
        torch._foreach_mul_([flat], factor)
        flat.nan_to_num_(0.0)
        if clip.limit is not None and clip.kind == "value":
            flat.clamp_(-clip.limit, clip.limit)
        return norm

    def close(self) -> None:
        for parameter, _ in self._slots:
            parameter.grad = None


class ShardedGradients:
    """Of parameters that FSDP2 has spread over the ranks: each rank holds its part of the mean's gradient."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], world_size: int) -> None:
        self._parameters = list(parameters.values())
        self._world_size = world_size

    def open(self) -> None:
        self.close()

    def collect(self) -> None:
        """FSDP2 has added them."""

    def finish(self, factor: float | Tensor, clip: GradientClipping) -> Tensor:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        parts = [local(gradient) for gradient in gradients]
        # FSDP2 takes the mean over ranks; ours are sums.
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
    """To each place its gradient, where it has one; in a few kernels for all."""
    found = [(slot, one) for slot, one in pairs if one is not None]
    if found:
        torch._foreach_add_([slot for slot, _ in found], [one for _, one in found])


def _coefficient(norm: Tensor, limit: float) -> Tensor:
    """As torch's `clip_grad_norm_`."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)
