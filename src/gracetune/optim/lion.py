"""Lion: the sign of an interpolated momentum (Chen et al., 2023), over all tensors of a group at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """update = sign(b1 m + (1 - b1) g);  p <- p (1 - lr wd) - lr update;  m <- b2 m + (1 - b2) g

    With `decoupled_weight_decay` the decay does not scale with the first learning rate: wd is divided by it once.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta <= 1 for beta in betas):
            raise ValueError(f"lr {lr} and weight_decay {weight_decay} from 0, betas {betas} from 0 to 1")
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
        momenta = [self._momentum(parameter) for parameter in trained]
        gradients = [_float(parameter.grad) for parameter in trained if parameter.grad is not None]
        updates = torch._foreach_lerp(momenta, gradients, 1.0 - beta1)
        torch._foreach_sign_(updates)
        if decay != 0:
            torch._foreach_mul_(trained, 1.0 - lr * decay)
        torch._foreach_add_(trained, updates, alpha=-lr)
        torch._foreach_lerp_(momenta, gradients, 1.0 - beta2)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
        momentum: Tensor = state["exp_avg"]
        return momentum


def _float(tensor: Tensor) -> Tensor:
    return tensor.float()
