"""DoRA: the adapted weight is m (W + D) / |W + D| by rows, where D is LoRA's change. peft's layer is the reference.

    lora_A.weight [r, in, *kernel], lora_B.weight [out, r, 1, 1], dora_scale [out]: m

With `dora_base_scale` instead of `dora_scale`, the rows are divided by |W| instead of |W + D|. This is how ComfyUI
interprets a `dora_scale` by rows; nothing is trained in that form. Files of LyCORIS have a `dora_scale` on any of its
algorithms, so the formula is in `adapters.delta`. `Lora.assemble` reads files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from gracetune.adapters.algorithms.low_rank import PEFT_NAMES, LowRank
from gracetune.adapters.algorithms.record import Dimensions, FirstValues, Options, WeightShape
from gracetune.adapters.computation import REFERENCE, Computation

if TYPE_CHECKING:
    from torch import nn

    from gracetune.adapters.fast.modules import AdaptedLinear
    from gracetune.adapters.layer import AttachedLayer
    from gracetune.adapters.options import LayerOptions


class Dora(LowRank):
    name = "dora"
    down, up = "lora_A.weight", "lora_B.weight"
    names = PEFT_NAMES
    same_as = ("locon",)
    trained_by_peft = True
    zero_at_first = frozenset({"lora_B.weight"})
    magnitude_by_rows = True

    file_tensors = ("lora_A.weight", "lora_B.weight", "dora_scale")
    spellings = (
        (r"\.lora_magnitude_vector(?:\.(?!weight$)[^.]+)?(?:\.weight)?", "magnitude"),
        (r"\.magnitude", "magnitude"),  # ai-toolkit
    )
    always_fp32 = ("dora_scale", "lora_magnitude_vector")
    """Training changes the row norms by about a thousandth, and bf16 has steps of four thousandths. The tensors are
    small, so fp32 costs little."""
    marks = ("dora_scale", "magnitude")
    proportional_to = ("lora_B.weight",)

    def shapes(self, layer: WeightShape, options: Options) -> dict[str, Dimensions]:
        return {**super().shapes(layer, options), "dora_scale": (layer.outputs,)}

    def first_values(self, layer: nn.Module, options: LayerOptions) -> FirstValues:
        """peft's initial values for a linear layer. Convolutions always use peft's own layers."""
        from gracetune.adapters.fast.modules import row_lengths
        from gracetune.adapters.peft_lora import initial_lora_factors

        return {
            **initial_lora_factors(layer, options.rank),
            "dora_scale": row_lengths(cast("nn.Linear", layer)),
        }, options.rank

    def computation(self, inputs: int, outputs: int, options: Options) -> Computation:
        if options.dropout > 0:
            return self.reference(outputs, options, "DoRA's dropout lets the base layer run twice")
        why = "two products of the rank's width, rows scaled after them"
        return Computation("low rank", why, kept=options.rank + outputs, fp32_output=True)

    def reference(self, outputs: int, options: Options, why: str) -> Computation:
        """The magnitude scales the base's output and the adapter's, so autograd keeps both."""
        kept = options.rank + 2 * outputs
        return Computation(REFERENCE, why, kept=kept, copies_input=True, fp32_output=True)

    def fused_layer(self) -> type[AdaptedLinear]:
        from gracetune.adapters.fast.modules import DoraLinear

        return DoraLinear

    def reference_layer(self, path: str, layer: nn.Module, options: LayerOptions, model: nn.Module) -> AttachedLayer:
        from gracetune.adapters.peft_lora import PeftLayer

        return PeftLayer(path, layer, options, model)


ALGORITHM = Dora()
