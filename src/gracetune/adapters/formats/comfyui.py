"""ComfyUI's format: keys are `diffusion_model.<original path>.<tensor>`, with the algorithm's tensor names.

ComfyUI's behaviour is taken from its `comfy/lora.py`, `comfy/utils.py` and `comfy/weight_adapter`; docs/adapters.md
lists the facts. Some original layouts fuse query, key and value. For them, ComfyUI also accepts diffusers' paths
(`KeyMap.comfyui_prefix`) and splits the fused matrices itself. In ComfyUI and in diffusers, a LoRA without alpha has a
scale of 1, so alpha is written for all LoRA layers or for none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

import torch
from torch import Tensor

from gracetune.adapters.algorithms.assembly import Convention
from gracetune.adapters.algorithms.low_rank import LowRank
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.delta import BASE_MAGNITUDE, MAGNITUDE
from gracetune.adapters.formats.diffusers import not_converted
from gracetune.adapters.formats.reading import AdapterContents, read_states
from gracetune.adapters.formats.record import Format
from gracetune.adapters.formats.writing import (
    Fault,
    FileContents,
    Spelling,
    Stem,
    alpha_in,
    check_layers_with,
    diffusers_stems,
    original_rejection,
    original_stems,
    row_magnitude,
)
from gracetune.adapters.formats.writing import write as write_with
from gracetune.adapters.state import AdapterState, Layer
from gracetune.models.keys import KeyMap
from gracetune.models.registry import KEY_MAPS

CONVENTION = Convention(without_alpha="rank")


def write(state: AdapterState, dtype: torch.dtype) -> FileContents:
    plain = all(layer.alpha == layer.rank for layer in state.layers.values() if _is_lora(layer))
    spelling = Spelling("comfyui", "A", lambda layer: _alpha(layer, plain=plain), rejection, dora_by_base=True)
    return write_with(state, dtype, spelling, _stems if KEY_MAPS[state.family].comfyui_takes_ours else _ORIGINAL)


_ORIGINAL = original_stems("diffusion_model.", ".")


def _stems(state: AdapterState, keys: KeyMap, faults: list[Fault]) -> Iterator[Stem]:
    """Layers by diffusers' paths. A layer with a bias on a matrix that ComfyUI would split or reorder is written by its
    original path instead, because ComfyUI cannot load a bias into a part of a matrix."""
    whole = {path for path, layer in state.layers.items() if _has_bias(layer) and _is_cut(path, keys)}
    by_our_names = diffusers_stems(keys.comfyui_prefix, ".")
    yield from by_our_names(_only(state, state.layers.keys() - whole), keys, faults)
    yield from _ORIGINAL(_only(state, whole), keys, faults)


def _only(state: AdapterState, paths: Set[str]) -> AdapterState:
    return replace(state, layers={path: layer for path, layer in state.layers.items() if path in paths})


def _has_bias(layer: Layer) -> bool:
    return algorithm(layer.algorithm).bias_tensor in layer.tensors


def _is_cut(path: str, keys: KeyMap) -> bool:
    """Whether ComfyUI would split or reorder the original model's matrix to load this layer by diffusers' path."""
    original = keys.original(path)
    return original is not None and (original.mapped.fused or original.mapped.halves_swapped)


def read(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], family: str) -> AdapterContents:
    return read_states(tensors, metadata, family, CONVENTION)


_OTHER_NORM = "ComfyUI divides DoRA's magnitudes by the norm of the base weight instead of the adapted one"
_WITH_MODEL = "with --model MODEL they are written so that the result is right"


def rejection(layer: Layer, path: str, keys: KeyMap) -> str | None:
    reason = _misreads(layer)
    if reason is not None:
        return f"{reason}; {_WITH_MODEL}" if reason == _OTHER_NORM else reason
    if not keys.comfyui_takes_ours:
        return original_rejection(layer, path, keys)
    return None if _has_bias(layer) else _cut_rejection(layer, path, keys)


def _misreads(layer: Layer) -> str | None:
    """What ComfyUI gets wrong about a layer, whatever its keys are."""
    if row_magnitude(layer) is not None:
        return _OTHER_NORM
    return algorithm(layer.algorithm).rejection("comfyui", layer.tensors)


def _cut_rejection(layer: Layer, path: str, keys: KeyMap) -> str | None:
    """For families whose fused matrices ComfyUI splits: why it cannot load this layer into a split or reordered matrix.
    None if it can."""
    original = keys.original(path)
    if original is None or not _is_cut(path, keys):
        return None
    if _has_bias(layer):
        return "ComfyUI does not load a bias into a matrix it cuts up or reorders"
    decomposed = not {MAGNITUDE, BASE_MAGNITUDE}.isdisjoint(layer.tensors)
    if original.mapped.halves_swapped and (algorithm(layer.algorithm).depends_on_weight or decomposed):
        return "ComfyUI reorders the rows of this layer's change, but not what it is computed from"
    return None


# -- how ComfyUI loads files of the other formats ---------------------------------------------------------------------


def _wrong_by_our_names(layer: Layer, path: str, keys: KeyMap) -> str | None:
    return _misreads(layer) or (_cut_rejection(layer, path, keys) if keys.comfyui_takes_ours else None)


misread_by_original_names = check_layers_with(lambda layer, path, keys: _misreads(layer))
misread_by_our_names = check_layers_with(_wrong_by_our_names)


def _is_lora(layer: Layer) -> bool:
    return isinstance(algorithm(layer.algorithm), LowRank)


def _alpha(layer: Layer, *, plain: bool) -> float | None:
    """The alpha to write. None for LoRA layers if all of them are `plain`, that is have a scale of 1."""
    return None if _is_lora(layer) and plain else alpha_in("comfyui", layer)


def _not_converted(layer: Layer, path: str, keys: KeyMap) -> str | None:
    if not keys.converter_reads_alpha and layer.alpha != layer.rank:
        return "diffusers' converter for this family rejects alphas, so alpha has to be the rank"
    return not_converted(layer, path, keys)


FORMAT = Format(
    write,
    read,
    readers={"comfyui": check_layers_with(rejection), "diffusers": check_layers_with(_not_converted)},
    made_for=("comfyui",),
    all_families=("comfyui",),
    dora_by_base=True,
    alpha_is_optional=True,
)
