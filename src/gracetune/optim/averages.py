"""Averages of the trained weights, for sampling and saving: exponential moving averages (EMA), and the averages that a
schedule-free optimizer keeps itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from gracetune.config.run_config import Ema as EmaConfig
from gracetune.errors import GracetuneError
from gracetune.optim.named_state import differences
from gracetune.optim.step_skipping import move_towards

# -- EMA ---------------------------------------------------------------------------------------------------------------


class EmaWeights:
    """`average <- decay average + (1 - decay) value`, every `update_every` optimizer steps.

    The average starts as a copy of the values. By default there is no bias correction: an adapter starts at the base
    model, and an early average should stay close to that. `ramp` and `copy_until` make the average follow the values
    more closely in the first steps (`decay_at`).
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], *, decay: float, update_every: int = 1, ramp: bool = False,
        copy_until: int = 0,
    ) -> None:  # fmt: skip
        if not 0 < decay < 1 or update_every < 1:
            raise ValueError(f"decay {decay} between 0 and 1, update_every {update_every} from 1")
        self.decay, self.update_every, self.ramp, self.copy_until = decay, update_every, ramp, copy_until
        self.steps = 0
        """Optimizer steps so far."""
        self._parameters = dict(parameters)
        self._averages = {name: _copy(parameter) for name, parameter in self._parameters.items()}

    @classmethod
    def from_config(cls, parameters: Mapping[str, Tensor], config: EmaConfig) -> EmaWeights | None:
        if not config.enabled:
            return None
        return cls(
            parameters, decay=config.decay, update_every=config.update_every, ramp=config.ramp,
            copy_until=config.copy_until,
        )  # fmt: skip

    def decay_at(self, step: int) -> float:
        """The decay at optimizer step number `step`, counted from 1."""
        if self.copy_until > 0:
            return 0.0 if step < self.copy_until else self.decay
        if not self.ramp:
            return self.decay
        return min(self.decay, step / (step + 9)) if step > 1 else 0.0

    @torch.no_grad()
    def update(self, bad: Tensor | None = None) -> None:
        """Call after every optimizer step; every `update_every`-th call averages.

        While the device flag `bad` is 1, the averages stay as they are (`optim.step_skipping`).
        """
        self.steps += 1
        if self.steps % self.update_every:
            return
        taken = 1.0 if bad is None else 1.0 - bad
        kept = self.decay_at(self.steps)
        move_towards([*self._averages.values()], [*self._parameters.values()], (1.0 - kept) * taken)

    @property
    def averages(self) -> Mapping[str, Tensor]:
        return self._averages

    @contextmanager
    @torch.no_grad()
    def swapped(self) -> Iterator[None]:
        """Put the averages into the model for the duration of the block, then restore the exact values, also on an
        error.
        """
        kept = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._put(self._averages)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    @torch.no_grad()
    def load_named_state(self, averages: Mapping[str, Tensor], steps: int) -> None:
        """Load strictly: if names or shapes differ, raise and change nothing."""
        shapes = {name: tuple(tensor.shape) for name, tensor in averages.items()}
        wrong = differences({name: tuple(tensor.shape) for name, tensor in self._averages.items()}, shapes)
        if wrong:
            raise GracetuneError(
                f"this EMA is of other parameters:\n{wrong}\nresume with the same adapter, or without EMA"
            )
        for name, average in self._averages.items():
            average.copy_(averages[name])
        self.steps = steps


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.float32, copy=True)


# -- schedule-free optimizers ------------------------------------------------------------------------------------------


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
