"""An adapter as plain data: the one form between training, file formats, merging and verification.

A layer is named by its module's path in diffusers' model (`blocks.0.attn1.to_q`). Its tensors carry the names the
algorithms' own papers and files use, without a prefix:

    lora, dora    lora_A.weight [r, in], lora_B.weight [out, r], of convolutions with the kernel; dora: dora_scale [out]
    locon         lora_down.weight, lora_up.weight (lycoris' own names), optional lora_mid.weight, dora_scale
    lokr          lokr_w1 or lokr_w1_a + lokr_w1_b; lokr_w2 or lokr_w2_a + lokr_w2_b, optional lokr_t2, dora_scale
    loha          hada_w1_a, hada_w1_b, hada_w2_a, hada_w2_b, optional hada_t1, hada_t2, dora_scale
    ia3           weight, on_input
    diag_oft      oft_blocks, optional rescale
    full_delta    diff, optional diff_b

`dora_base_scale` instead of `dora_scale` is DoRA measured against the base weight's rows instead of the adapted
weight's: what a `dora_scale` by rows means in a file for ComfyUI. Nothing is trained in that form.

`alpha` is a finite number beside the tensors, never one of them. The delta's scale is `alpha / rank`, except where no
factor is decomposed (whole LoKr, (IA)3, OFT, full): there it is 1, and alpha is 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Algorithm = Literal["lora", "dora", "lokr", "loha", "locon", "ia3", "diag_oft", "full_delta"]
Stage = Literal["", "high_noise", "low_noise"]


@dataclass(frozen=True, eq=False)
class Layer:
    algorithm: Algorithm
    tensors: Mapping[str, Tensor]
    alpha: float
    rank: int | None
    """None where nothing is decomposed."""

    @property
    def scale(self) -> float:
        return 1.0 if self.rank is None else self.alpha / self.rank


@dataclass(frozen=True, eq=False)
class AdapterState:
    """All layers of one adapter of one denoiser."""

    family: str
    stage: Stage
    layers: Mapping[str, Layer]
    """By module path, in the model's own order."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Of the file it came from; what we write is made by `adapters.metadata`."""
