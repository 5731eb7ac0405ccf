"""The format of kohya's sd-scripts, musubi-tuner and LyCORIS for kohya.

Keys are `lora_unet_<original path with underscores>.<tensor>`. Every layer has an alpha.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gracetune.adapters.algorithms.assembly import Convention
from gracetune.adapters.algorithms.low_rank import CORE, LowRank
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.delta import MAGNITUDE
from gracetune.adapters.formats.comfyui import misread_by_original_names
from gracetune.adapters.formats.diffusers import misread_by_converter
from gracetune.adapters.formats.layers import is_in_a_block, is_plain_lora
from gracetune.adapters.formats.lycoris import misread
from gracetune.adapters.formats.reading import AdapterContents, read_states
from gracetune.adapters.formats.record import Format, Reader
from gracetune.adapters.formats.writing import (
    Fault,
    FileContents,
    Spelling,
    alpha_in,
    original_rejection,
    original_stems,
)
from gracetune.adapters.formats.writing import write as write_with
from gracetune.adapters.state import AdapterState, Layer
from gracetune.models.registry import KEY_MAPS

CONVENTION = Convention(without_alpha="rank")  # sd-scripts' rule: a missing alpha means alpha = rank


def write(state: AdapterState, dtype: torch.dtype) -> FileContents:
    spelling = Spelling("kohya", "down", lambda layer: alpha_in("kohya", layer), original_rejection)
    return write_with(state, dtype, spelling, original_stems("lora_unet_", "_"))


def read(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], family: str) -> AdapterContents:
    return read_states(tensors, metadata, family, CONVENTION)


# -- how programs load such files -------------------------------------------------------------------------------------


def _including_unwritable(reader: Reader) -> Reader:
    """Extend a reader by the layers that the format cannot hold: no program reads them."""

    def misread_layers(state: AdapterState) -> Iterator[Fault]:
        keys = KEY_MAPS[state.family]
        found = {path: original_rejection(layer, path, keys) for path, layer in state.layers.items()}
        yield from ((path, reason) for path, reason in found.items() if reason is not None)
        held = {path: layer for path, layer in state.layers.items() if found[path] is None}
        yield from reader(replace(state, layers=held))

    return misread_layers


def _misread_by_musubi(state: AdapterState) -> Iterator[Fault]:
    """musubi-tuner infers the file's kind from the first key it knows, and merges only layers of this kind."""
    kinds = Counter(_kind(layer) for layer in state.layers.values())
    kinds.pop(None, None)
    first = next(iter(kinds.most_common(1)), (None, 0))[0]
    for path, layer in state.layers.items():
        kind = _kind(layer)
        if kind is None:
            yield path, f"musubi-tuner loads LoRA, LoHa and LoKr, and ignores {layer.algorithm}"
        elif kind != first:
            yield path, f"musubi-tuner loads one kind of adapter from a file, and {first} is in it too"
        elif MAGNITUDE in layer.tensors:
            yield path, "musubi-tuner ignores DoRA's magnitudes"
        elif not _CORES.isdisjoint(layer.tensors):
            yield path, "musubi-tuner has no Tucker form"
        elif "lokr_w1_a" in layer.tensors:
            yield path, "musubi-tuner skips a LoKr whose first factor is decomposed"
        elif kind == "LoRA" and max(tensor.ndim for tensor in layer.tensors.values()) > 4:
            yield path, "musubi-tuner merges no LoRA into a 3-d convolution"
        elif kind != "LoRA" and "lokr_w2" not in layer.tensors and not is_in_a_block(path):
            yield path, f"musubi-tuner merges {kind} into matrices only, and this layer may be a convolution"


def _kind(layer: Layer) -> str | None:
    if isinstance(algorithm(layer.algorithm), LowRank):
        return "LoRA"
    return {"loha": "LoHa", "lokr": "LoKr"}.get(layer.algorithm)


_CORES = {CORE, "hada_t1", "lokr_t2"}


def _misread_by_sd_scripts(state: AdapterState) -> Iterator[Fault]:
    """sd-scripts loads files with `networks.lora`, or for some families with `lycoris.kohya` if the user selects it."""
    keys = KEY_MAPS[state.family]
    plain = all(map(is_plain_lora, state.layers.values()))
    if not plain and ("kohya", "lycoris") in keys.also_read_by:
        cannot = dict(misread(state))
        for path, layer in state.layers.items():
            if MAGNITUDE in layer.tensors:
                yield path, "sd-scripts' networks.lora ignores DoRA's magnitudes"
            elif path in cannot:
                yield path, cannot[path]
        return
    for path, layer in state.layers.items():
        original = keys.original(path)
        if MAGNITUDE in layer.tensors:
            yield path, "sd-scripts ignores DoRA's magnitudes"
        elif not is_plain_lora(layer):
            yield path, f"sd-scripts loads LoRA for {state.family}, and not {layer.algorithm}"
        elif not is_in_a_block(path) and not (
            keys.fused and original and original.name.partition(".")[0][-3:] == "_in"
        ):
            yield path, "sd-scripts loads no LoRA of this layer"


FORMAT = Format(
    write,
    read,
    readers={
        "musubi": _including_unwritable(_misread_by_musubi),
        "sd-scripts": _including_unwritable(_misread_by_sd_scripts),
        "comfyui": _including_unwritable(misread_by_original_names),
        "diffusers": _including_unwritable(misread_by_converter),
        "lycoris": _including_unwritable(misread),
    },
    made_for=("musubi", "sd-scripts", "comfyui"),
    all_families=("comfyui",),
    alpha_is_optional=True,
)
