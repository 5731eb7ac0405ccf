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
from lycoris.modules.diag_oft import DiagOFTModule
from lycoris.modules.ia3 import IA3Module
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from torch import Tensor, nn

from gracetune.adapters.delta import change
from gracetune.adapters.layer import AttachedLayer, registered
from gracetune.adapters.options import LayerOptions
from gracetune.adapters.state import Algorithm

CHILD = "adapter"
"""Name of the module inside the layer."""


class Factors(nn.Module):
    """The trained tensors of one layer, and what they add to its output."""

    def __init__(self, algorithm: Algorithm, tensors: Mapping[str, Tensor], scale: float, dropout: float) -> None:
        super().__init__()
        self.algorithm = algorithm
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
            base = layer.weight.detach().float() if self.algorithm in ("ia3", "diag_oft") else None
            weight = change(self.algorithm, tensors, self.scale, layer.weight.shape, base).to(x.dtype)
        bias = tensors["diff_b"].to(x.dtype) if "diff_b" in tensors else None
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
        tensors, rank = first_values(layer, options)
        super().__init__(path, options.algorithm, options.alpha, rank)
        weight = cast(Tensor, layer.weight)
        self._layer = layer
        self._factors = Factors(options.algorithm, tensors, self.scale, options.dropout).to(weight.device)
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

    @property
    def constants(self) -> Mapping[str, Tensor]:
        return {"on_input": torch.tensor(0)} if self.algorithm == "ia3" else {}


# -- the factors' shapes and first values -----------------------------------------------------------------------------

Made = tuple[dict[str, Tensor], int | None]
"""Tensors, and the rank where something is decomposed."""


def first_values(layer: nn.Module, options: LayerOptions) -> Made:
    """The factors as lycoris-lora makes them for this layer."""
    return _MAKERS[options.algorithm](layer, options)


def _taken(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _library(kind: Callable[..., nn.Module], layer: nn.Module, options: LayerOptions, **more: Any) -> dict[str, Tensor]:
    with _quiet():
        return _taken(kind("", layer, 1.0, options.rank, options.alpha, **more))


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


def _lokr(layer: nn.Module, options: LayerOptions) -> Made:
    tensors = _library(
        LokrModule,
        layer,
        options,
        factor=options.factor,
        decompose_both=options.decompose_both,
        full_matrix=options.full_rank,
    )
    whole = "lokr_w1" in tensors and "lokr_w2" in tensors
    return tensors, None if whole else options.rank


def _full(layer: nn.Module, _options: LayerOptions) -> Made:
    """Not the library's: that one takes the weight out of its layer and keeps a second copy of it."""
    weight, bias = cast(Tensor, layer.weight), cast("Tensor | None", layer.bias)
    tensors = {"diff": torch.zeros_like(weight, dtype=torch.float32)}
    if bias is not None:
        tensors["diff_b"] = torch.zeros_like(bias, dtype=torch.float32)
    return tensors, None


_MAKERS: Mapping[str, Callable[[nn.Module, LayerOptions], Made]] = {
    "locon": lambda layer, options: (_library(LoConModule, layer, options), options.rank),
    "loha": lambda layer, options: (_library(LohaModule, layer, options), options.rank),
    "lokr": _lokr,
    "ia3": lambda layer, options: (_library(IA3Module, layer, options), None),
    "diag_oft": lambda layer, options: (_library(DiagOFTModule, layer, options), None),
    "full_delta": _full,
}
