"""ComfyUI: `diffusion_model.<original path>`, the tensors by their algorithms' own names.

What ComfyUI does with them was read in its `comfy/lora.py`, `comfy/utils.py` and `comfy/weight_adapter`; the facts are
in docs/adapters.md. FLUX.1's original layout fuses query, key and value; for it ComfyUI takes
`transformer.<diffusers path>` and cuts the matrices up itself. A LoRA without alpha has scale 1, there and in
diffusers, so alpha is written for all LoRA layers or for none.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gracetune.adapters.delta import BASE_MAGNITUDE, MAGNITUDE
from gracetune.adapters.formats.layers import Convention
from gracetune.adapters.formats.reading import Reading, read_states
from gracetune.adapters.formats.record import Format
from gracetune.adapters.formats.writing import (
    Spelling,
    Written,
    original_refusal,
    original_stems,
    our_stems,
    row_magnitude,
)
from gracetune.adapters.formats.writing import write as write_with
from gracetune.adapters.state import AdapterState, Layer
from gracetune.models.key_maps import KEY_MAPS
from gracetune.models.keys import KeyMap

CONVENTION = Convention(without_alpha="rank")
_CORES = ("lora_mid.weight", "hada_t1", "hada_t2")


def write(state: AdapterState, dtype: torch.dtype) -> Written:
    plain = all(layer.alpha == layer.rank for layer in state.layers.values() if _is_lora(layer))
    spelling = Spelling("comfyui", "A", lambda layer: _alpha(layer, plain=plain), refusal)
    stems = (
        our_stems("{}.", ".") if KEY_MAPS[state.family].comfyui_takes_ours else original_stems("diffusion_model.", ".")
    )
    return write_with(state, dtype, spelling, stems)


def read(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], family: str) -> Reading:
    return read_states(tensors, metadata, family, CONVENTION)


def refusal(layer: Layer, path: str, keys: KeyMap) -> str | None:
    if layer.algorithm == "ia3":
        return "ComfyUI does not know (IA)3"
    if row_magnitude(layer) is not None:
        return (
            "ComfyUI divides DoRA's magnitudes by the norm of the base weight instead of the adapted one; "
            "with --model MODEL they are written so that the result is right"
        )
    if "rescale" in layer.tensors:
        return "ComfyUI leaves out OFT's rescale"
    if "lokr_t2" in layer.tensors:
        return "torch.kron refuses what ComfyUI builds of LoKr's Tucker form, and ComfyUI then leaves the layer out"
    second = layer.tensors.get("lokr_w2")
    if second is not None and second.ndim not in (2, 4):
        return "ComfyUI multiplies Kronecker factors of matrices and 2-d convolutions only"
    if any(layer.tensors[core].ndim != 4 for core in _CORES if core in layer.tensors):
        return "ComfyUI takes Tucker forms of 2-d convolutions only"
    return _cut_refusal(layer, path, keys) if keys.comfyui_takes_ours else original_refusal(layer, path, keys)


def _cut_refusal(layer: Layer, path: str, keys: KeyMap) -> str | None:
    """For families whose fused matrices ComfyUI cuts up: what it cannot put into a cut or a reordered matrix."""
    original = keys.original(path)
    if original is None or not (original.place.fused or original.place.halves_swapped):
        return None
    if "diff_b" in layer.tensors:
        return "ComfyUI does not load a bias into a matrix it cuts up or reorders"
    decomposed = not {MAGNITUDE, BASE_MAGNITUDE}.isdisjoint(layer.tensors)
    if original.place.halves_swapped and (layer.algorithm == "diag_oft" or decomposed):
        return "ComfyUI reorders the rows of this layer's change, but not what it is computed from"
    return None


def _is_lora(layer: Layer) -> bool:
    return layer.algorithm in ("lora", "dora", "locon")


def _alpha(layer: Layer, *, plain: bool) -> float | None:
    if layer.algorithm in ("ia3", "diag_oft", "full_delta"):  # for ComfyUI OFT's alpha is a constraint
        return None
    return None if _is_lora(layer) and plain else layer.alpha


FORMAT = Format(write, read)
