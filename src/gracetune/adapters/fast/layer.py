"""Chooses how a layer's adapter is computed, and attaches the factorised layers of `fast.modules`."""

from __future__ import annotations

from typing import cast

from torch import nn

from gracetune.adapters.algorithms.record import algorithm
from gracetune.adapters.computation import Computation
from gracetune.adapters.layer import AttachedLayer, parameter_name
from gracetune.adapters.options import LayerOptions


def choice(layer: nn.Module, options: LayerOptions) -> Computation:
    """How this layer's adapter is computed, and the reason."""
    if not isinstance(layer, nn.Linear):
        return reference(layer, options, "convolutions")
    return algorithm(options.algorithm).computation(layer.in_features, layer.out_features, options)


def reference(layer: nn.Module, options: LayerOptions, why: str) -> Computation:
    """The computation by the library's layer, with the reason for it."""
    outputs = layer.out_features if isinstance(layer, nn.Linear) else cast(nn.Conv2d, layer).out_channels
    return algorithm(options.algorithm).reference(outputs, options, why)


class FastLayer(AttachedLayer):
    def __init__(
        self, path: str, layer: nn.Linear, options: LayerOptions, computation: Computation, model: nn.Module
    ) -> None:  # fmt: skip
        record = algorithm(options.algorithm)
        tensors, rank = record.first_values(layer, options)
        super().__init__(path, options.algorithm, options.alpha, rank)
        self._names = {name: parameter_name(name) for name in tensors}
        self._base = layer
        self._layer = record.fused_layer()(layer, tensors, computation, scale=self.scale, dropout=options.dropout)
        model.set_submodule(path, self._layer, strict=True)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: self._layer.get_parameter(own) for name, own in self._names.items()}

    def set_strength(self, strength: float) -> None:
        self._layer.set_strength(strength)

    def remove(self, model: nn.Module) -> None:
        model.set_submodule(self.path, self._base, strict=True)
