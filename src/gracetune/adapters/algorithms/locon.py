"""LoCon, LyCORIS' LoRA for linear layers and convolutions: the change is s B A, with s = alpha / rank.

    lora_down.weight [r, in, *kernel]: A; lora_up.weight [out, r, 1, 1]: B

In files there may also be a dora_scale, and a lora_mid.weight [r, r, *kernel] between B and A (Tucker form). Reading
renames a file's matrices to lora_A and lora_B, so `Lora.assemble` builds these layers.
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
    is_lora = True
    down, up = "lora_down.weight", "lora_up.weight"
    names = LYCORIS_NAMES
    same_as = ("lora",)
    zero_at_first = frozenset({"lora_up.weight"})

    marks = ("lora_mid",)
    row_tensors = ("lora_up.weight",)
    proportional_to = ("lora_up.weight",)

    def first_values(self, layer: nn.Module, options: LayerOptions) -> FirstValues:
        from lycoris.modules.locon import LoConModule

        from gracetune.adapters.lycoris import factors_from_lycoris

        return factors_from_lycoris(LoConModule, layer, options), options.rank

    def fused_layer(self) -> type[AdaptedLinear]:
        from gracetune.adapters.fast.modules import LoconLinear

        return LoconLinear


ALGORITHM = Locon()
