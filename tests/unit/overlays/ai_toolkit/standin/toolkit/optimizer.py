from __future__ import annotations

from typing import Any

import torch


class TheirAutomagic(torch.optim.SGD):
    """Recognisable, and as particular about its options as the real one."""


def get_optimizer(
    params: Any, optimizer_type: str = "adam", learning_rate: float = 1e-6, optimizer_params: Any = None
) -> Any:
    cls = TheirAutomagic if optimizer_type == "automagic" else torch.optim.AdamW
    return cls(params, lr=learning_rate, **(optimizer_params or {}))
