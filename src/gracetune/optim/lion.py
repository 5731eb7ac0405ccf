"""Lion (Chen et al., 2023): steps by the sign of an interpolated momentum.

Updates all tensors of a group with torch._foreach functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gracetune.adapters.layer import local_shard
from gracetune.optim.step_skipping import move_towards


class Lion(Optimizer):
    """update = sign(b1 m + (1 - b1) g);  p <- p (1 - lr wd) - lr update;  m <- b2 m + (1 - b2) g

    With `decoupled_weight_decay`, wd is divided once by the initial learning rate. The decay per step is then wd at any
    initial learning rate, and follows the schedule.
    """

    _step_supports_amp_scaling = True
    """torch's marker for optimizers that skip a step while `found_inf` is 1 (`optim.step_skipping`)."""
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta <= 1 for beta in betas):
            raise ValueError(
                "expected lr >= 0, weight_decay >= 0 and betas in [0, 1]; "
                f"found lr {lr}, weight_decay {weight_decay} and betas {betas}"
            )
        if decoupled_weight_decay and lr == 0:
            raise ValueError("decoupled_weight_decay divides by the learning rate, which is 0")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})
        if decoupled_weight_decay:
            for group in self.param_groups:
                group["weight_decay"] /= group["lr"]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self._step_group(group, trained)
        return loss

    def _step_group(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        # At 0 the step changes nothing, and the host does not wait for the flag. `train.gradients` has zeroed bad
        # gradients.
        applied = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        momenta = [local_shard(self._momentum(parameter)) for parameter in trained]
        gradients = [local_shard(parameter.grad).float() for parameter in trained if parameter.grad is not None]
        parameters = [local_shard(parameter) for parameter in trained]
        updates = torch._foreach_lerp(momenta, gradients, 1.0 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(updates, applied)
        if decay != 0:
            torch._foreach_mul_(parameters, 1.0 - lr * decay * applied)
        torch._foreach_add_(parameters, updates, alpha=-lr)
        move_towards(momenta, gradients, (1.0 - beta2) * applied)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
        momentum: Tensor = state["exp_avg"]
        return momentum
