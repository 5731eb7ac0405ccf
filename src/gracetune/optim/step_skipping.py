"""Steps that are left out where a window's gradients were no numbers, without the host having to know of it.

`bad` is one number on the device: 1 leaves parameters and state as they are, 0 changes nothing of an ordinary step.
torch's own protocol for that (its GradScaler uses it too): an optimizer whose `_step_supports_amp_scaling` is true
reads `found_inf` in its step. Fused AdamW does, and so do Automagic and Lion here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gracetune.adapters.layer import local

_MOST = 1 << 24
"""Elements that are worked on at a time (64 MiB of float32), or one tensor that has more."""


def heeds(optimizer: Optimizer) -> bool:
    """Whether its step can be told on the device to do nothing."""
    optimizer_: Any = optimizer
    return bool(getattr(optimizer_, "_step_supports_amp_scaling", False))


def step_unless(optimizer: Optimizer, bad: Tensor) -> None:
    """One step, or none at all. The host waits for `bad` only where the optimizer cannot be told on the device."""
    if heeds(optimizer):
        signalled: Any = optimizer
        signalled.found_inf = bad
        try:
            optimizer.step()
        finally:
            del signalled.found_inf
    elif not bool(bad):
        optimizer.step()


def waiting_note(optimizer: Optimizer, name: str, device: torch.device) -> str | None:
    if heeds(optimizer) or device.type != "cuda":
        return None
    return (
        f"{name}: the host waits for every window's gradients before a step, because this optimizer cannot be told on "
        "the GPU to leave one out; automagic, lion and fused adamw can"
    )


@torch.no_grad()
def move_towards(tensors: Sequence[Tensor], goals: Sequence[Tensor], weight: float | Tensor) -> None:
    """tensor += weight (goal - tensor), in place; a few at a time, so that many of them need no second copy of all."""
    pairs = [(local(tensor), local(goal)) for tensor, goal in zip(tensors, goals, strict=True)]
    for some in _parts(pairs):
        held = [tensor for tensor, _ in some]
        steps = torch._foreach_sub([goal.to(tensor.dtype) for tensor, goal in some], held)
        torch._foreach_mul_(steps, weight)
        torch._foreach_add_(held, steps)


def _parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    part: list[tuple[Tensor, Tensor]] = []
    elements = 0
    for pair in pairs:
        part.append(pair)
        elements += pair[0].numel()
        if elements >= _MOST:
            yield part
            part, elements = [], 0
    if part:
        yield part
