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

from gracetune.adapters.algorithms.assembly import Convention
from gracetune.adapters.algorithms.low_rank import LowRank
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.delta import BASE_MAGNITUDE, MAGNITUDE
from gracetune.adapters.formats.reading import Reading, read_states
from gracetune.adapters.formats.record import Format
from gracetune.adapters.formats.writing import (
    Spelling,
    Written,
    alpha_in,
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
    if row_magnitude(layer) is not None:
        return (
            "ComfyUI divides DoRA's magnitudes by the norm of the base weight instead of the adapted one; "
            "with --model MODEL they are written so that the result is right"
        )
    reason = algorithm(layer.algorithm).refusal("comfyui", layer.tensors)
    if reason is not None:
        return reason
    return _cut_refusal(layer, path, keys) if keys.comfyui_takes_ours else original_refusal(layer, path, keys)


def _cut_refusal(layer: Layer, path: str, keys: KeyMap) -> str | None:
    """For families whose fused matrices ComfyUI cuts up: what it cannot put into a cut or a reordered matrix."""
    original = keys.original(path)
    if original is None or not (original.place.fused or original.place.halves_swapped):
        return None
    record = algorithm(layer.algorithm)
    if record.bias_tensor in layer.tensors:
        return "ComfyUI does not load a bias into a matrix it cuts up or reorders"
    decomposed = not {MAGNITUDE, BASE_MAGNITUDE}.isdisjoint(layer.tensors)
    if original.place.halves_swapped and (record.depends_on_weight or decomposed):
        return "ComfyUI reorders the rows of this layer's change, but not what it is computed from"
    return None


def _is_lora(layer: Layer) -> bool:
    return isinstance(algorithm(layer.algorithm), LowRank)


def _alpha(layer: Layer, *, plain: bool) -> float | None:
    return None if _is_lora(layer) and plain else alpha_in("comfyui", layer)


FORMAT = Format(write, read)
