"""Diag-OFT: rotates blocks of the weight's rows. The change is (R - 1) W with R = (1 + Q) (1 - Q)^-1.

Q = B - B^T is skew-symmetric, so R (the Cayley transform of Q) is a rotation.

    oft_blocks [blocks, size, size]: B; in files also rescale [out]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.adapters.algorithms.assembly import Convention, LayerError, sides
from gracetune.adapters.algorithms.matrices import check_count, factorization
from gracetune.adapters.algorithms.record import Algorithm, Dimensions, FirstValues, Options, Tensors, WeightShape
from gracetune.adapters.state import Layer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gracetune.adapters.options import LayerOptions


class DiagOft(Algorithm):
    name = "diag_oft"
    lycoris_name = "diag-oft"
    zero_at_first = frozenset({"oft_blocks"})
    depends_on_weight = True

    file_tensors = ("oft_blocks", "rescale")
    needed = frozenset({"oft_blocks"})
    always_fp32 = ("rescale",)
    marks = ("oft_blocks",)

    def shapes(self, layer: WeightShape, options: Options) -> dict[str, Dimensions]:
        size, blocks = factorization(layer.outputs, options.rank)
        return {"oft_blocks": (blocks, size, size)}

    def first_values(self, layer: nn.Module, options: LayerOptions) -> FirstValues:
        from lycoris.modules.diag_oft import DiagOFTModule

        from gracetune.adapters.lycoris import factors_from_lycoris

        return factors_from_lycoris(DiagOFTModule, layer, options), None

    def changed(self, tensors: Tensors, weight: Tensor) -> Tensor:
        import torch

        blocks = tensors["oft_blocks"]  # [k, n, n]: k blocks of n rows
        check_count(blocks.shape[0] * blocks.shape[1], weight.shape[0], "rows in blocks", weight.shape)
        skew = blocks - blocks.transpose(1, 2)
        identity = torch.eye(blocks.shape[1], device=blocks.device, dtype=blocks.dtype)
        rotation = (identity + skew) @ torch.linalg.inv(identity - skew)
        rows = weight.reshape(blocks.shape[0], blocks.shape[1], -1)
        rotated = torch.einsum("knm,kni->kmi", rotation - identity, rows).reshape(weight.shape)
        rescale = tensors.get("rescale")
        if rescale is None:
            return rotated
        rescale = rescale.reshape(-1, *(1,) * (weight.dim() - 1))
        return rescale * rotated + (rescale - 1) * weight

    def assemble(self, tensors: Tensors, alpha: float | None, convention: Convention) -> Layer:
        blocks = tensors["oft_blocks"]
        if blocks.ndim != 3 or blocks.shape[1] != blocks.shape[2]:
            raise LayerError(f"oft_blocks {sides(blocks)}: Diag-OFT has square blocks [blocks, size, size]")
        rescale, rows = tensors.get("rescale"), blocks.shape[0] * blocks.shape[1]
        if rescale is not None and rescale.numel() != rows:
            raise LayerError(f"rescale {sides(rescale)} for {rows} outputs")
        if alpha:  # LyCORIS stores OFT's constraint as alpha; our states cannot represent one
            raise LayerError(f"an OFT constraint of {alpha:g}; only OFT without a constraint can be read")
        return Layer("diag_oft", dict(tensors), 1.0, None)

    def outputs(self, tensors: Tensors) -> int | None:
        return tensors["oft_blocks"].shape[0] * tensors["oft_blocks"].shape[1]

    def columns(self, tensors: Tensors) -> int | None:
        return None

    def alpha_in(self, format: str, alpha: float) -> float | None:
        """alpha is OFT's constraint here. LyCORIS files say 0 for no constraint; ComfyUI files leave it out."""
        return None if format == "comfyui" else 0.0

    def rejection(self, format: str, tensors: Tensors) -> str | None:
        if format == "comfyui":
            return "ComfyUI leaves out OFT's rescale" if "rescale" in tensors else None
        return super().rejection(format, tensors)


ALGORITHM = DiagOft()
