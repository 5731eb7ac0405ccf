"""Skip optimizer steps with non-finite gradients, without synchronizing the host with the GPU.

`bad` is a scalar on the device: at 1 the step leaves parameters and state as they are, at 0 it is an ordinary step.
This is torch's own protocol, which its GradScaler uses too: an optimizer whose `_step_supports_amp_scaling` is true
reads `found_inf` in its step. Fused AdamW follows it, and so do our Automagic and Lion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gracetune.adapters.layer import local_shard

_CHUNK = 1 << 24
"""Elements processed at a time (64 MiB of float32); a larger tensor is processed alone."""


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Whether a flag on the device can make the optimizer skip a step."""
    optimizer_: Any = optimizer
    return bool(getattr(optimizer_, "_step_supports_amp_scaling", False))


def step_unless(optimizer: Optimizer, bad: Tensor) -> None:
    """Take one step, or none if `bad` is 1.

    The host waits for `bad` only if the optimizer cannot read it on the device.
    """
    if can_skip_on_device(optimizer):
        signalled: Any = optimizer
        signalled.found_inf = bad
        try:
            optimizer.step()
        finally:
            del signalled.found_inf
    elif not bool(bad):
        optimizer.step()


def waiting_note(optimizer: Optimizer, name: str, device: torch.device) -> str | None:
    """A note for optimizers that make the host wait on a GPU; None for the others."""
    if can_skip_on_device(optimizer) or device.type != "cuda":
        return None
    return (
        f"{name}: the host waits for the gradients before every optimizer step, because this optimizer cannot skip a "
        "step on the GPU; automagic, lion and fused adamw can"
    )


@torch.no_grad()
def move_towards(tensors: Sequence[Tensor], goals: Sequence[Tensor], weight: float | Tensor) -> None:
    """tensor += weight (goal - tensor), in place. Works in chunks, so it needs no second copy of all tensors."""
    pairs = [(local_shard(tensor), local_shard(goal)) for tensor, goal in zip(tensors, goals, strict=True)]
    for chunk in _chunks(pairs):
        current = [tensor for tensor, _ in chunk]
        steps = torch._foreach_sub([goal.to(tensor.dtype) for tensor, goal in chunk], current)
        torch._foreach_mul_(steps, weight)
        torch._foreach_add_(current, steps)


def _chunks(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    chunk: list[tuple[Tensor, Tensor]] = []
    elements = 0
    for pair in pairs:
        chunk.append(pair)
        elements += pair[0].numel()
        if elements >= _CHUNK:
            yield chunk
            chunk, elements = [], 0
    if chunk:
        yield chunk
