"""The common part of LoRA, DoRA and LoCon: s B A, with a down matrix A and an up matrix B.

A is [r, in, *kernel] and B is [out, r], for convolutions [out, r, 1, ...].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from gracetune.adapters.algorithms.matrices import (
    core_rejection,
    core_size,
    product_norm,
    reshape_change,
    svd_of_product,
    tucker_norm,
    with_core,
)
from gracetune.adapters.algorithms.record import Algorithm, Dimensions, Options, SingularVectors, Tensors, WeightShape
from gracetune.adapters.computation import Computation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PEFT_NAMES = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}
LYCORIS_NAMES = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}
CORE = "lora_mid.weight"
"""The core [r, r, *kernel] between down and up, for a convolution in LyCORIS' Tucker form. It is read from files and
written to them, but not trained."""


class LowRank(Algorithm):
    down: ClassVar[str]
    up: ClassVar[str]
    names: ClassVar[dict[str, str]]
    """Maps the other library's names of the two matrices to this algorithm's names."""
    same_as: ClassVar[tuple[str, ...]]
    """Algorithms whose layers differ from this one's only in the names of the tensors."""
    rank_is_width = True

    def shapes(self, layer: WeightShape, options: Options) -> dict[str, Dimensions]:
        ones = (1,) * len(layer.kernel)
        return {
            self.down: (options.rank, layer.inputs, *layer.kernel),
            self.up: (layer.outputs, options.rank, *ones),
        }

    def added(self, tensors: Tensors, shape: torch.Size) -> Tensor:
        up, down = tensors[self.up].flatten(1), tensors[self.down].flatten(1)
        core = tensors.get(CORE)
        if core is None:
            return reshape_change(up @ down, shape)
        import torch

        return reshape_change(torch.einsum("ab...,oa,bi->oi...", core, up, down), shape)

    def norm(self, tensors: Tensors, scale: float) -> float | None:
        up, down, core = tensors[self.up].flatten(1), tensors[self.down].flatten(1), tensors.get(CORE)
        return abs(scale) * (product_norm(up, down) if core is None else tucker_norm(up.T, down, core))

    def singular_vectors(self, tensors: Tensors, scale: float, rank: int) -> SingularVectors | None:
        up, down = (tensors[name].detach().double().flatten(1) for name in (self.up, self.down))
        core = tensors.get(CORE)
        if core is not None:
            down = with_core(down, core.detach().double())
        left, values, right = svd_of_product(up * scale, down)
        return left[:, :rank], values[:rank], right[:rank], float(values.norm())

    def computation(self, inputs: int, outputs: int, options: Options) -> Computation:
        return Computation("low rank", "two products of the rank's width", kept=options.rank)

    def least_dimensions(self, tensor: str) -> int:
        return 2 if tensor.startswith("lora_") else 0

    def renamed(self, algorithm: str, tensors: Tensors) -> dict[str, Tensor] | None:
        if algorithm not in self.same_as or CORE in tensors:
            return None
        found = {self.names.get(name, name): tensor for name, tensor in tensors.items()}
        if "dora_scale" in found:
            found["dora_scale"] = found["dora_scale"].flatten()
        return found

    def outputs(self, tensors: Tensors) -> int | None:
        return tensors[self.up].shape[0]

    def columns(self, tensors: Tensors) -> int | None:
        return math.prod(tensors[self.down].shape[1:]) * core_size(tensors.get(CORE))

    def rejection(self, format: str, tensors: Tensors) -> str | None:
        if format == "diffusers" and CORE in tensors:
            return "PEFT has no Tucker form"
        return core_rejection(tensors.get(CORE)) if format == "comfyui" else None
