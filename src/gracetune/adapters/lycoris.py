"""The reference layers of the LyCORIS algorithms.

lycoris-lora creates the factors, so their shapes and initial values are its own. It does not run them, for two reasons.
Its modules live outside the model, where `.to()`, DDP, FSDP and `state_dict` do not find them. And its forward pass
computes (W + D) - W in the base weight's precision, which in bf16 loses all but the largest changes. Here the factors
are parameters of a submodule of the layer, and a forward hook adds their output to the layer's output. The layer keeps
its class, its weight and its parameter names.
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
from gracetune.adapters.layer import AttachedLayer, parameter_name
from gracetune.adapters.options import LayerOptions

CHILD = "adapter"
"""The name of the submodule that holds the factors."""


class Factors(nn.Module):
    """The trained tensors of one layer. The forward pass returns what they add to the layer's output."""

    def __init__(self, record: Algorithm, tensors: Mapping[str, Tensor], scale: float, dropout: float) -> None:
        super().__init__()
        self.record = record
        self.scale = scale
        self.dropout = dropout
        self.strength = 1.0
        self.parameter_names = {name: parameter_name(name) for name in tensors}
        for name, tensor in tensors.items():
            self.register_parameter(self.parameter_names[name], nn.Parameter(tensor.float()))

    def tensors(self) -> dict[str, nn.Parameter]:
        return {name: self.get_parameter(own) for name, own in self.parameter_names.items()}

    def forward(self, layer: nn.Linear | nn.modules.conv._ConvNd, x: Tensor) -> Tensor:
        """The tensor to add to the layer's output for the input `x`, at strength 1."""
        # The change is built in fp32 and rounded once; autocast would round the factors first.
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


# -- initial values of the factors ------------------------------------------------------------------------------------


def factors_from_lycoris(
    kind: Callable[..., nn.Module], layer: nn.Module, options: LayerOptions, **more: Any
) -> dict[str, Tensor]:
    """The factors that a module class of lycoris-lora creates for this layer."""
    with _quiet():
        module = kind("", layer, 1.0, options.rank, options.alpha, **more)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable lycoris-lora's logger: it logs to stdout, which is reserved for a command's output."""
    logger = logging.getLogger("LyCORIS")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
