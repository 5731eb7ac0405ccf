"""(IA)3: the change is W * w, with one factor for each output channel; in files also for each input channel.

weight [out], for convolutions [1, out, 1, 1]: w; on_input: a flag, not trained
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from gracetune.adapters.algorithms.assembly import Convention, LayerError, check_vector, sides
from gracetune.adapters.algorithms.matrices import check_count
from gracetune.adapters.algorithms.record import Algorithm, Dimensions, FirstValues, Options, Tensors, WeightShape
from gracetune.adapters.state import Layer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gracetune.adapters.options import LayerOptions

FLAG = "on_input"


class Ia3(Algorithm):
    name = "ia3"
    lycoris_name = "ia3"
    has_rank = False
    zero_at_first = frozenset({"weight"})
    constants: ClassVar[Mapping[str, int]] = {FLAG: 0}
    depends_on_weight = True

    file_tensors = ("weight", FLAG)
    needed = frozenset({"weight", FLAG})
    marks = (FLAG,)
    loadable = False

    def shapes(self, layer: WeightShape, options: Options) -> dict[str, Dimensions]:
        ones = (1,) * len(layer.kernel)
        return {"weight": (1, layer.outputs, *ones) if layer.kernel else (layer.outputs,)}

    def first_values(self, layer: nn.Module, options: LayerOptions) -> FirstValues:
        from lycoris.modules.ia3 import IA3Module

        from gracetune.adapters.lycoris import factors_from_lycoris

        return factors_from_lycoris(IA3Module, layer, options), None

    def changed(self, tensors: Tensors, weight: Tensor) -> Tensor:
        trailing = (1,) * (weight.dim() - 2)
        on_input = FLAG in tensors and bool(tensors[FLAG].item())
        along = (1, -1, *trailing) if on_input else (-1, 1, *trailing)
        factors = tensors["weight"]
        check_count(factors.numel(), weight.shape[1 if on_input else 0], "factors", weight.shape)
        return weight * factors.reshape(along)

    def claims(self, names: set[str]) -> bool:
        if names == {"weight"}:
            raise LayerError("a plain weight: no tensor of an adapter")
        return super().claims(names)

    def least_dimensions(self, tensor: str) -> int:
        return 1 if tensor == "weight" else 0

    def assemble(self, tensors: Tensors, alpha: float | None, convention: Convention) -> Layer:
        if tensors[FLAG].numel() != 1:
            raise LayerError(f"{FLAG} is {sides(tensors[FLAG])}: expected one number, 0 or 1")
        if float(tensors[FLAG]) not in (0.0, 1.0):
            raise LayerError(f"{FLAG} is {float(tensors[FLAG]):g}: expected 0 or 1")
        check_vector("weight", tensors["weight"])
        return super().assemble(tensors, alpha, convention)

    def outputs(self, tensors: Tensors) -> int | None:
        return None  # it may scale either side

    def columns(self, tensors: Tensors) -> int | None:
        return None

    def misfit(self, tensors: Tensors, shape: Dimensions) -> str | None:
        wanted = shape[1] if bool(tensors[FLAG].item()) else shape[0]
        found = tensors["weight"].numel()
        return None if found == wanted else f"{found} factors for {wanted} channels"

    def alpha_in(self, format: str, alpha: float) -> float | None:
        return None

    def rejection(self, format: str, tensors: Tensors) -> str | None:
        return "ComfyUI does not support (IA)3" if format == "comfyui" else super().rejection(format, tensors)


ALGORITHM = Ia3()
