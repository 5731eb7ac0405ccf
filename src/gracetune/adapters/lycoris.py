"""The LyCORIS algorithms, as a part of the layer they belong to.

lycoris-lora makes the factors: their shapes and first values are its own. It does not run them: its modules live
outside the model (where `.to()`, DDP, FSDP and `state_dict` do not look), and its forward computes (W + D) - W in the
base weight's precision, which for bf16 loses all but the largest changes. Here the factors are parameters of a module
inside the layer, and a hook adds what they make of the layer's input; the layer's own forward, weight and names stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gracetune.adapters.algorithms.record import Algorithm
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.delta import change
from gracetune.adapters.layer import AttachedLayer, registered
from gracetune.adapters.options import LayerOptions

CHILD = "adapter"
"""Name of the module inside the layer."""


class Factors(nn.Module):
    """The trained tensors of one layer, and what they add to its output."""

    def __init__(self, record: Algorithm, tensors: Mapping[str, Tensor], scale: float, dropout: float) -> None:
        super().__init__()
        self.record = record
        self.scale = scale
        self.dropout = dropout
        self.strength = 1.0
        self.registered = {name: registered(name) for name in tensors}
        for name, tensor in tensors.items():
            self.register_parameter(self.registered[name], nn.Parameter(tensor.float()))

    def tensors(self) -> dict[str, nn.Parameter]:
        return {name: self.get_parameter(own) for name, own in self.registered.items()}

    def forward(self, layer: nn.Linear | nn.modules.conv._ConvNd, x: Tensor) -> Tensor:
        """What has to be added to the layer's output for `x`, at strength 1."""
        with torch.autocast(x.device.type, enabled=False):
            tensors = {name: tensor.float() for name, tensor in self.tensors().items()}
            base = layer.weight.detach().float() if self.record.depends_on_weight else None
            weight = change(self.record, tensors, self.scale, layer.weight.shape, base).to(x.dtype)
        bias_tensor = self.record.bias_tensor
        bias = tensors[bias_tensor].to(x.dtype) if bias_tensor in tensors else None
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        if isinstance(layer, nn.Linear):
            return F.linear(x, weight, bias)
        return _CONVOLUTIONS[weight.dim()](x, weight, bias, layer.stride, layer.padding)


_CONVOLUTIONS: Mapping[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def _add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    factors = cast(Factors, layer.get_submodule(CHILD))
    if factors.strength == 0:
        return output
    added: Tensor = factors(layer, inputs[0])
    return output + (added * factors.strength if factors.strength != 1 else added).to(output.dtype)


class LycorisLayer(AttachedLayer):
    def __init__(self, path: str, layer: nn.Module, options: LayerOptions) -> None:
        tensors, rank = algorithm(options.algorithm).first_values(layer, options)
        super().__init__(path, options.algorithm, options.alpha, rank)
        weight = cast(Tensor, layer.weight)
        self._layer = layer
        self._factors = Factors(self.record, tensors, self.scale, options.dropout).to(weight.device)
        self._factors.train(layer.training)
        layer.add_module(CHILD, self._factors)
        self._hook = layer.register_forward_hook(_add)

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._factors.tensors()

    def set_strength(self, strength: float) -> None:
        self._factors.strength = strength

    def remove(self, model: nn.Module) -> None:
        self._hook.remove()
        delattr(self._layer, CHILD)


# -- the factors' first values ----------------------------------------------------------------------------------------


def made_by_library(
    kind: Callable[..., nn.Module], layer: nn.Module, options: LayerOptions, **more: Any
) -> dict[str, Tensor]:
    """The factors as a module of lycoris-lora makes them for this layer."""
    with _quiet():
        module = kind("", layer, 1.0, options.rank, options.alpha, **more)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@contextmanager
def _quiet() -> Iterator[None]:
    """lycoris-lora logs to stdout, where a command's answer belongs; what it has to say is in our own report."""
    logger = logging.getLogger("LyCORIS")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
