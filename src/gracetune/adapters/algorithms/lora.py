"""LoRA: the change is s B A, with s = alpha / rank. peft's layer is the reference.

    lora_A.weight [r, in, *kernel]: A; lora_B.weight [out, r], for convolutions [out, r, 1, ...]: B

`lora_A` and `lora_B` of a file may also belong to a DoRA (with a `dora_scale`) or a LoCon (by the file's convention, or
in Tucker form). `assemble` distinguishes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.adapters.algorithms.assembly import Convention, LayerError, check_core, defined_alpha, is_by_input, sides
from gracetune.adapters.algorithms.low_rank import CORE, LYCORIS_NAMES, PEFT_NAMES, LowRank
from gracetune.adapters.algorithms.record import FirstValues, Options, Tensors
from gracetune.adapters.computation import REFERENCE, Computation
from gracetune.adapters.state import Layer

if TYPE_CHECKING:
    from torch import nn

    from gracetune.adapters.fast.modules import AdaptedLinear
    from gracetune.adapters.layer import AttachedLayer
    from gracetune.adapters.options import LayerOptions


class Lora(LowRank):
    name = "lora"
    lycoris_name = "lora"
    down, up = "lora_A.weight", "lora_B.weight"
    names = PEFT_NAMES
    same_as = ("locon",)
    is_lora = True
    trained_by_peft = True
    zero_at_first = frozenset({"lora_B.weight"})

    file_tensors = ("lora_A.weight", "lora_B.weight", CORE, "dora_scale")
    needed = frozenset({"lora_A.weight", "lora_B.weight"})
    spellings = (
        (r"\.lora_(?P<side>[AB])(?:\.(?!weight$)[^.]+)?\.weight", "lora_{side}.weight"),  # PEFT may name the adapter
        (r"\.lora_(?P<side>[AB])", "lora_{side}.weight"),
        (r"\.lora_down\.weight", "lora_A.weight"),
        (r"\.lora_up\.weight", "lora_B.weight"),
        (r"[._]lora\.down\.weight", "lora_A.weight"),
        (r"[._]lora\.up\.weight", "lora_B.weight"),
        (r"\.lora_linear_layer\.down\.weight", "lora_A.weight"),
        (r"\.lora_linear_layer\.up\.weight", "lora_B.weight"),
    )
    marks = ("lora_",)  # DoRA and LoCon have it too: their records are tested first
    row_tensors = ("lora_B.weight",)
    proportional_to = ("lora_B.weight",)
    kohya_module = "networks.lora"

    def first_values(self, layer: nn.Module, options: LayerOptions) -> FirstValues:
        """peft's initial values for a linear layer. Convolutions always use peft's own layers."""
        from gracetune.adapters.peft_lora import initial_lora_factors

        return initial_lora_factors(layer, options.rank), options.rank

    def reference(self, outputs: int, options: Options, why: str) -> Computation:
        return Computation(REFERENCE, why, kept=options.rank, copies_input=True)

    def fused_layer(self) -> type[AdaptedLinear]:
        from gracetune.adapters.fast.modules import LoraLinear

        return LoraLinear

    def reference_layer(self, path: str, layer: nn.Module, options: LayerOptions, model: nn.Module) -> AttachedLayer:
        from gracetune.adapters.peft_lora import PeftLayer

        return PeftLayer(path, layer, options, model)

    def assemble(self, tensors: Tensors, alpha: float | None, convention: Convention) -> Layer:
        """A LoRA, DoRA or LoCon layer, depending on the other tensors and on the file's convention."""
        down, up = tensors["lora_A.weight"], tensors["lora_B.weight"]
        if down.shape[0] != up.shape[1]:
            ranks = f"rank {down.shape[0]} ({sides(down)}), lora_B.weight {up.shape[1]} ({sides(up)})"
            raise LayerError(f"lora_A.weight has {ranks}")
        rank = down.shape[0]
        middle = tensors.get(CORE)
        kernels = [("lora_B.weight", up), *([("lora_A.weight", down)] if middle is not None else [])]
        for name, tensor in kernels:
            if any(side != 1 for side in tensor.shape[2:]):
                raise LayerError(f"{name} is {sides(tensor)}: expected a kernel with one point")
        check_core(tensors, CORE, rank)
        scale = tensors.get("dora_scale")
        inputs = down.shape[1]
        by_input = scale is not None and is_by_input(scale, up.shape[0]) and scale.numel() == inputs
        if scale is not None and not by_input and scale.numel() != up.shape[0]:
            raise LayerError(f"dora_scale {sides(scale)} for {up.shape[0]} outputs and {inputs} inputs")
        alpha = defined_alpha(alpha, rank, convention)
        kind = "locon" if middle is not None or by_input else convention.kind_of("lora" if scale is None else "dora")
        if kind == "locon":
            named = {LYCORIS_NAMES.get(name, name): tensor for name, tensor in tensors.items()}
            return Layer(kind, named, alpha, rank)
        magnitude = {} if scale is None else {"dora_scale": scale.reshape(-1)}
        return Layer(kind, {**tensors, **magnitude}, alpha, rank)


ALGORITHM = Lora()
