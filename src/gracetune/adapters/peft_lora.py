"""LoRA and DoRA layers of peft: each replaces one layer of the model, at an exact path.

peft selects layers by name suffix: a top-level `proj_out` would also match the one in every block. So each layer is
passed to peft alone, in a `ModuleDict` with a single entry.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gracetune.adapters.layer import AttachedLayer
from gracetune.adapters.options import LayerOptions

_NAME = "default"
_BOX = "layer"


class PeftLayer(AttachedLayer):
    def __init__(self, path: str, layer: nn.Module, options: LayerOptions, model: nn.Module) -> None:
        super().__init__(path, options.algorithm, options.alpha, options.rank)
        self._base = layer
        self._layer = _wrap(layer, options)
        self._interpolation: RemovableHandle | None = None
        model.set_submodule(path, self._layer, strict=True)

    def parameters(self) -> dict[str, nn.Parameter]:
        parts = cast(Any, self._layer)
        found = {"lora_A.weight": parts.lora_A[_NAME].weight, "lora_B.weight": parts.lora_B[_NAME].weight}
        if self.algorithm == "dora":
            found["dora_scale"] = parts.lora_magnitude_vector[_NAME].weight
        return found

    def set_strength(self, strength: float) -> None:
        layer = cast(LoraLayer, self._layer)
        flags = [(parameter, parameter.requires_grad) for parameter in self.parameters().values()]
        layer.enable_adapters(strength != 0)
        for parameter, trained in flags:  # `enable_adapters` sets the flags, which would unfreeze a frozen expert
            parameter.requires_grad_(trained)
        if self.algorithm == "lora":
            layer.scaling[_NAME] = self.scale * strength
            return
        # peft would scale D inside m (W + D) / |W + D|, which is not W even at a scale of 0. So interpolate outputs.
        if self._interpolation is not None:
            self._interpolation.remove()
            self._interpolation = None
        if strength not in (0, 1):
            self._interpolation = self._layer.register_forward_hook(_between(strength))

    def remove(self, model: nn.Module) -> None:
        model.set_submodule(self.path, self._base, strict=True)

    def shapes(self) -> dict[str, torch.Size]:
        """peft holds the magnitudes of a convolution as [1, out, 1, 1]; states have [out]."""
        shapes = super().shapes()
        if self.algorithm == "dora":
            shapes["dora_scale"] = torch.Size((shapes["dora_scale"].numel(),))
        return shapes


def _between(strength: float) -> Any:
    def interpolate(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        base: Tensor = cast(LoraLayer, layer).get_base_layer()(*inputs)
        return base + strength * (output - base)

    return interpolate


def _wrap(layer: nn.Module, options: LayerOptions) -> nn.Module:
    """peft's layer around this one. The base's gradient flags and the global generator stay as they were."""
    config = LoraConfig(
        r=options.rank,
        lora_alpha=cast(int, options.alpha),  # annotated as int, but any number works
        lora_dropout=options.dropout,
        target_modules=[_BOX],
        use_dora=options.algorithm == "dora",
    )
    flags = [(parameter, parameter.requires_grad) for parameter in layer.parameters()]
    rng_state = torch.get_rng_state()
    box = inject_adapter_in_model(config, nn.ModuleDict({_BOX: layer}), _NAME)
    for parameter, trained in flags:
        parameter.requires_grad_(trained)
    wrapped = box.get_submodule(_BOX)
    wrapped.train(layer.training)
    torch.set_rng_state(rng_state)
    _set_fp32_values(wrapped, dora=options.algorithm == "dora")
    return wrapped


def initial_lora_factors(layer: nn.Module, rank: int) -> dict[str, Tensor]:
    """The initial values that peft gives a LoRA on a linear layer."""
    linear = cast(nn.Linear, layer)
    down = _kaiming(torch.Size((rank, linear.in_features)))
    return {"lora_A.weight": down, "lora_B.weight": torch.zeros(linear.out_features, rank)}


def _kaiming(shape: torch.Size) -> Tensor:
    """Initial values of lora_A by peft's rule, on the CPU."""
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5))


def _set_fp32_values(wrapped: nn.Module, *, dora: bool) -> None:
    """Replace peft's tensors by fp32 ones. peft creates them in the base weight's precision.

    lora_A is sampled again by peft's rule, on the CPU, so that its values do not depend on the base weight's precision
    or device. DoRA's magnitudes are the row norms of the base weight, computed in fp32.
    """
    parts = cast(Any, wrapped)
    down = parts.lora_A[_NAME]
    down.weight = nn.Parameter(_kaiming(down.weight.shape).to(down.weight.device))
    parts.lora_B.float()
    if dora:
        magnitude = parts.lora_magnitude_vector[_NAME]
        weight = parts.get_base_layer().weight.detach().float()
        length = weight.flatten(1).norm(dim=1)
        magnitude.weight = nn.Parameter(length.reshape(magnitude.weight.shape))
