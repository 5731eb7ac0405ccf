"""Full difference: the change of the weight and of the bias, without any decomposition. LyCORIS calls it `full`.

diff [out, in, *kernel]; diff_b [out] if the layer has a bias
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from gracetune.adapters.algorithms.assembly import Convention, LayerError
from gracetune.adapters.algorithms.matrices import reshape_change
from gracetune.adapters.algorithms.record import Algorithm, Dimensions, FirstValues, Options, Tensors, WeightShape
from gracetune.adapters.computation import REFERENCE, Computation
from gracetune.adapters.state import Layer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gracetune.adapters.options import LayerOptions


class FullDelta(Algorithm):
    name = "full_delta"
    lycoris_name = "full"
    has_rank = False
    zero_at_first = frozenset({"diff", "diff_b"})
    bias_tensor = "diff_b"

    file_tensors = ("diff", "diff_b")
    needed = frozenset({"diff"})
    marks = ("diff",)
    row_tensors = ("diff", "diff_b")

    def shapes(self, layer: WeightShape, options: Options) -> dict[str, Dimensions]:
        bias: dict[str, Dimensions] = {"diff_b": (layer.outputs,)} if layer.bias else {}
        return {"diff": (layer.outputs, layer.inputs, *layer.kernel), **bias}

    def first_values(self, layer: nn.Module, options: LayerOptions) -> FirstValues:
        """Zeros. LyCORIS' module is not used: it takes the weight out of its layer and keeps a second copy of it."""
        import torch

        weight, bias = cast("Tensor", layer.weight), cast("Tensor | None", layer.bias)
        tensors = {"diff": torch.zeros_like(weight, dtype=torch.float32)}
        if bias is not None:
            tensors["diff_b"] = torch.zeros_like(bias, dtype=torch.float32)
        return tensors, None  # no rank

    def added(self, tensors: Tensors, shape: torch.Size) -> Tensor:
        return reshape_change(tensors["diff"], shape)

    def norm(self, tensors: Tensors, scale: float) -> float | None:
        return float(tensors["diff"].norm())  # nothing is decomposed, so the scale is 1

    def reference(self, outputs: int, options: Options, why: str) -> Computation:
        """The trained tensor is the change itself, so nothing is built."""
        return Computation(REFERENCE, why)

    def least_dimensions(self, tensor: str) -> int:
        return 1 if tensor == "diff" else 0

    def most_dimensions(self, tensor: str) -> int:
        return 1 if tensor == "diff_b" else super().most_dimensions(tensor)

    def assemble(self, tensors: Tensors, alpha: float | None, convention: Convention) -> Layer:
        bias, outputs = tensors.get("diff_b"), tensors["diff"].shape[0]
        if bias is not None and bias.numel() != outputs:
            raise LayerError(f"diff_b of {bias.numel()} for {outputs} outputs")
        return super().assemble(tensors, alpha, convention)

    def outputs(self, tensors: Tensors) -> int | None:
        return tensors["diff"].shape[0]

    def columns(self, tensors: Tensors) -> int | None:
        return None  # `misfit` compares the whole shape

    def weight_shape(self, tensors: Tensors) -> Dimensions | None:
        return tuple(tensors["diff"].shape)

    def misfit(self, tensors: Tensors, shape: Dimensions) -> str | None:
        found = tuple(tensors["diff"].shape)
        if found != shape:
            return f"a difference of {'x'.join(map(str, found))} for a weight of {'x'.join(map(str, shape))}"
        if "diff_b" in tensors and tensors["diff_b"].numel() != shape[0]:
            return f"a bias of {tensors['diff_b'].numel()} for {shape[0]} outputs"
        return None

    def alpha_in(self, format: str, alpha: float) -> float | None:
        return None

    def rejection(self, format: str, tensors: Tensors) -> str | None:
        return None if format == "comfyui" else super().rejection(format, tensors)


ALGORITHM = FullDelta()
