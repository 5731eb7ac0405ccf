"""The averages a schedule-free optimizer trains towards: what a user gets of such a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch.optim import Optimizer


@runtime_checkable
class ScheduleFree(Protocol):
    """They have both: the averages are put in the parameters' place, and taken out again."""

    def eval(self) -> None: ...

    def train(self) -> None: ...


@contextmanager
def averaged(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the model has the averages, if the optimizer keeps some; outside again exactly what it had.

    The optimizer computes its way back, which rounds: without the copies, drawing a sample would change the run.
    """
    if not isinstance(optimizer, ScheduleFree):
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for parameter, before in zip(parameters, kept, strict=True):
                parameter.copy_(before)
