"""Hooks that make each module of a denoiser wait for the updates of its own weights.

A repeated block waits once for all its weights, before its compiled code. Every other module that owns parameters waits
for those. A forward pass therefore begins while the updates of later blocks still run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator

from torch import nn

from gracetune.models.expert_streaming import before_each_call
from gracetune.optim.chunked_adamw import ChunkedAdamW


def wait_in(denoiser: nn.Module, blocks: Collection[str], optimizer: ChunkedAdamW) -> None:
    """`blocks` are the class names of the repeated blocks."""
    known = weakref.ref(optimizer)
    for module, parameters in _owners(denoiser, blocks):
        last = optimizer.last_chunk(parameters)
        if last is not None:
            before_each_call(module, _waiting(known, last))


def _owners(module: nn.Module, blocks: Collection[str]) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    if type(module).__name__ in blocks:
        yield module, list(module.parameters())
        return
    own = list(module.parameters(recurse=False))
    if own:
        yield module, own
    for child in module.children():
        yield from _owners(child, blocks)


def _waiting(known: weakref.ref[ChunkedAdamW], last: int) -> Callable[[], None]:
    """Holds the optimizer weakly, so that a hook does not keep its states alive."""

    def wait() -> None:
        if (optimizer := known()) is not None:
            optimizer.wait_for(last)

    return wait
