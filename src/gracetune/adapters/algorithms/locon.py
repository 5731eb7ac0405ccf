"""LoCon, LyCORIS' LoRA for linear layers and convolutions: s B A, in files also with a core between them (Tucker form).

    lora_down.weight [r, in, *kernel], lora_up.weight [out, r, 1, 1], in files also lora_mid.weight and dora_scale

Its tensors in a file are LoRA's, so files are read by `Lora.assemble`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.adapters.algorithms.low_rank import LYCORIS_NAMES, LowRank
from gracetune.adapters.algorithms.record import FirstValues

if TYPE_CHECKING:
    from torch import nn

    from gracetune.adapters.fast.modules import AdaptedLinear
    from gracetune.adapters.options import LayerOptions


class Locon(LowRank):
    name = "locon"
    lycoris_name = "locon"
    down, up = "lora_down.weight", "lora_up.weight"
    names = LYCORIS_NAMES
    same_as = ("lora",)
    zero_at_first = frozenset({"lora_up.weight"})

    marks = ("lora_mid",)
    row_tensors = ("lora_up.weight",)
    proportional_to = ("lora_up.weight",)

    def first_values(self, layer: nn.Module, options: LayerOptions) -> FirstValues:
        from lycoris.modules.locon import LoConModule

        from gracetune.adapters.lycoris import made_by_library

        return made_by_library(LoConModule, layer, options), options.rank

    def fused_layer(self) -> type[AdaptedLinear]:
        from gracetune.adapters.fast.modules import LoconLinear

        return LoconLinear


ALGORITHM = Locon()
