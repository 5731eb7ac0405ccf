#!/usr/bin/env python3
"""ai-toolkit's DoRA: a layer's tensors after some training, an input, and what its own forward pass makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from aitoolkit_base import prepare
from common import record

OUTPUTS, INPUTS, RANK = 6, 5, 2


def values(peer: Path) -> Any:
    prepare(peer)
    from toolkit.models.DoRA import DoRAModule

    torch.manual_seed(0)
    base = torch.nn.Linear(INPUTS, OUTPUTS)
    network = _Network()  # the layer keeps a weak reference to it
    layer = DoRAModule("layer", base, lora_dim=RANK, alpha=RANK, network=network)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    given = torch.randn(1, INPUTS)
    layer.apply_to()
    tensors = {
        "weight": base.weight, "bias": base.bias, "lora_down": layer.lora_down.weight,
        "lora_up": layer.lora_up.weight, "magnitude": layer.magnitude, "input": given, "output": base(given),
    }  # fmt: skip
    return {name: tensor.detach().tolist() for name, tensor in tensors.items()}


class _Network:
    """What a layer asks of the network that it is part of."""

    is_lorm, is_active, is_merged_in, _multiplier = False, True, False, 1.0
    torch_multiplier = torch.ones(1)


if __name__ == "__main__":
    record("DoRA", values)
