"""Automagic's learning rates as ai-toolkit keeps them (`optimizer.options.rates: upstream`).

Rates are 8-bit integers with one scale per parameter tensor: the tensor's largest rate / 127. Storing rounds away a
bump below half a unit, so with the default limits rates stop following the signs after some 250 bumps. The first update
of a tensor counts as following one that increased every element. Both change the result, and are useful only to compare
a run with ai-toolkit. The default, `rates: exact`, loses no bump (`optim/element_rates.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from gracetune.optim.automagic_stack import Stack, UpdateRule, per_parameter

_LARGEST = 127


@dataclass(eq=False)
class UpstreamStack(Stack):
    """A stack whose `rates` are int8; `moments["scale"]`, [n], is the learning rate of one unit."""

    @classmethod
    def of(cls, parameters: Sequence[Tensor], names: Sequence[str], lr: float, rule: UpdateRule) -> Self:
        stack = super().of(parameters, names, lr, rule)
        stack.rates = torch.full_like(stack.rates, _LARGEST, dtype=torch.int8)
        stack.moments["scale"] = torch.full((len(names),), lr / _LARGEST, device=stack.rates.device)
        stack.signs.zero_()
        return stack

    def read_rates(self, rule: UpdateRule) -> Tensor:
        return self.rates.float() * per_parameter(self.moments["scale"], self.rates)

    @torch.no_grad()
    def put_rates(self, at: int, rates: Tensor, rule: UpdateRule) -> None:
        state = {"rate": self.rates[at : at + 1], "scale": self.moments["scale"][at : at + 1]}
        self._store(rates[None].to(self.rates.device, torch.float32), state)

    def _move_rates(self, positive: Tensor, state: dict[str, Tensor], rule: UpdateRule) -> Tensor:
        limits = rule.grid.limits
        rates = state["rate"].float() * per_parameter(state["scale"], state["rate"])
        bumps = torch.where(state["sign"] == positive, limits.lr_bump, -limits.lr_bump)
        rates.add_(bumps).clamp_(limits.min_lr, limits.max_lr)
        self._store(rates, state)
        return rates

    def _store(self, rates: Tensor, state: dict[str, Tensor]) -> None:
        size = math.prod(rates.shape[1:])
        largest = rates.reshape(len(rates), -1).amax(1) if size else torch.zeros_like(state["scale"])
        if self.sharding is not None:  # all shards of a tensor share its scale
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.sharding.group)
        state["scale"].copy_(largest / _LARGEST)
        state["rate"].copy_((rates / per_parameter(state["scale"], rates)).round().clamp(-_LARGEST, _LARGEST))
