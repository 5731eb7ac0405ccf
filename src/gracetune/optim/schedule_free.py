"""Sampling and saving with the averaged weights of a schedule-free optimizer, which are its result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch.optim import Optimizer


@runtime_checkable
class ScheduleFree(Protocol):
    """An optimizer whose `eval` puts the averages into the parameters and whose `train` takes them out again."""

    def eval(self) -> None: ...

    def train(self) -> None: ...


@contextmanager
def averaged(optimizer: Optimizer) -> Iterator[None]:
    """Put the optimizer's averages, if it has any, into the model for the duration of the block.

    `train()` computes the previous values back and rounds. The copies restore them exactly; without them, sampling
    would change the run.
    """
    if not isinstance(optimizer, ScheduleFree):
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
