"""Gradients of a window: summed over its samples and over all ranks, scaled once, clipped, and checked.

A replica's gradients are views of one flat buffer for each expert. So a window ends with one all-reduce and a handful
of kernels, however many small matrices an adapter has. torch's DistributedDataParallel is not used: adapters are small
beside their model, one reduction at the window's end is all there is to overlap, and its hooks would have to be told
about accumulation, about experts whose turn it is not, and about layers without a gradient.

Sharded parameters (FSDP2) reduce their gradients themselves, in every backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gracetune.optim.skipping import local

Reduce = Callable[[Tensor], None]
"""Sums a tensor over all ranks, in place."""


@dataclass(frozen=True)
class Clip:
    kind: Literal["norm", "value"] = "norm"
    limit: float | None = 1.0
    """None: gradients are taken as they are."""


class Gradients(Protocol):
    def open(self) -> None:
        """A window begins: gradients are 0."""

    def finish(self, factor: float | Tensor, clip: Clip) -> Tensor:
        """Reduce, multiply by `factor`, clip. The norm before clipping, on the device, and the same on every rank.

        Where that is not finite all gradients have become 0: nothing that is not a number reaches the weights.
        """

    def close(self) -> None:
        """The optimizer has stepped: until the next window these parameters have no gradient at all."""


class FlatGradients:
    """Of parameters every rank has whole."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], reduce: Reduce | None = None) -> None:
        self._parameters = list(parameters.values())
        devices = {parameter.device for parameter in self._parameters}
        if len(devices) != 1 or any(parameter.dtype != torch.float32 for parameter in self._parameters):
            raise ValueError(f"trained parameters in float32 on one device, not on {devices}")
        size = sum(parameter.numel() for parameter in self._parameters)
        self._flat = torch.zeros(size, dtype=torch.float32, device=devices.pop())
        self._reduce = reduce

    def open(self) -> None:
        self._flat.zero_()
        pieces = self._flat.split([parameter.numel() for parameter in self._parameters])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.grad = piece.view(parameter.shape)

    def finish(self, factor: float | Tensor, clip: Clip) -> Tensor:
        flat = self._flat
        if self._reduce is not None:
            self._reduce(flat)
        flat.mul_(factor)
        norm: Tensor = torch.linalg.vector_norm(flat)
        if clip.limit is not None and clip.kind == "norm":
            flat.mul_(_coefficient(norm, clip.limit))
        elif clip.limit is not None:
            flat.clamp_(-clip.limit, clip.limit)
        flat.copy_(torch.where(norm.isfinite(), flat, 0.0))
        return norm

    def close(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class ShardedGradients:
    """Of parameters that FSDP2 has spread over the ranks: each rank holds its part of the mean's gradient."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], world_size: int) -> None:
        self._parameters = list(parameters.values())
        self._world_size = world_size

    def open(self) -> None:
        self.close()

    def finish(self, factor: float | Tensor, clip: Clip) -> Tensor:
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


def _coefficient(norm: Tensor, limit: float) -> Tensor:
    """As torch's `clip_grad_norm_`."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)
