"""Which linear layers are computed by `fast.products`, and those layers as a part of `Attached`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gracetune.adapters import lycoris, peft_lora
from gracetune.adapters.computation import Computation, choose, reference
from gracetune.adapters.fast.modules import (
    AdaptedLinear,
    DoraLinear,
    LoconLinear,
    LohaLinear,
    LokrLinear,
    LoraLinear,
    row_lengths,
)
from gracetune.adapters.layer import AttachedLayer, registered
from gracetune.adapters.options import LayerOptions

_MODULES: Mapping[str, type[AdaptedLinear]] = {
    "lora": LoraLinear,
    "dora": DoraLinear,
    "locon": LoconLinear,
    "lokr": LokrLinear,
    "loha": LohaLinear,
}


def choice(layer: nn.Module, options: LayerOptions) -> Computation:
    """How this layer's adapter is computed, and why."""
    if not isinstance(layer, nn.Linear):
        return reference("convolutions")
    return choose(options.algorithm, layer.in_features, layer.out_features, options)


class FastLayer(AttachedLayer):
    def __init__(
        self, path: str, layer: nn.Linear, options: LayerOptions, how: Computation, model: nn.Module
    ) -> None:  # fmt: skip
        tensors, rank = _first_values(layer, options)
        super().__init__(path, options.algorithm, options.alpha, rank)
        self._names = {name: registered(name) for name in tensors}
        self._base = layer
        self._layer = _MODULES[options.algorithm](layer, tensors, how, scale=self.scale, dropout=options.dropout)
        model.set_submodule(path, self._layer, strict=True)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: self._layer.get_parameter(own) for name, own in self._names.items()}

    def set_strength(self, strength: float) -> None:
        self._layer.set_strength(strength)

    def remove(self, model: nn.Module) -> None:
        model.set_submodule(self.path, self._base, strict=True)


def _first_values(layer: nn.Linear, options: LayerOptions) -> tuple[dict[str, Tensor], int | None]:
    """Those of the libraries, bit for bit."""
    if options.algorithm not in peft_lora.ALGORITHMS:
        return lycoris.first_values(layer, options)
    down = peft_lora.drawn(torch.Size((options.rank, layer.in_features)))
    tensors = {"lora_A.weight": down, "lora_B.weight": torch.zeros(layer.out_features, options.rank)}
    if options.algorithm == "dora":
        tensors["dora_scale"] = row_lengths(layer)
    return tensors, options.rank
