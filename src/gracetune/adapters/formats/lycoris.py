"""The format of LyCORIS' wrapper around a diffusers model. It can hold every adapter.

Keys are `lycoris_<diffusers path with underscores>.<tensor>`. LoRA is written as LoCon, and DoRA as LoCon with a
dora_scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gracetune.adapters.algorithms.assembly import Convention
from gracetune.adapters.algorithms.lokr import lycoris_can_load
from gracetune.adapters.delta import MAGNITUDE
from gracetune.adapters.formats.comfyui import misread_by_our_names
from gracetune.adapters.formats.reading import AdapterContents, read_states
from gracetune.adapters.formats.record import Format
from gracetune.adapters.formats.writing import (
    FileContents,
    Spelling,
    alpha_in,
    check_layers_with,
    diffusers_stems,
    row_magnitude,
)
from gracetune.adapters.formats.writing import write as write_with
from gracetune.adapters.state import AdapterState, Layer
from gracetune.config.registry import is_loadable

CONVENTION = Convention(
    without_alpha="undefined",  # LyCORIS cannot rebuild a layer without alpha
    lora_is_locon=True,
    dora_is_locon=True,
)


def write(state: AdapterState, dtype: torch.dtype) -> FileContents:
    spelling = Spelling("lycoris", "down", lambda layer: alpha_in("lycoris", layer), lambda layer, path, keys: None)
    return write_with(state, dtype, spelling, diffusers_stems("lycoris_", "_"))


def read(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], family: str) -> AdapterContents:
    return read_states(tensors, metadata, family, CONVENTION)


def _cannot_rebuild(layer: Layer) -> str | None:
    tensors = layer.tensors
    if MAGNITUDE in tensors and row_magnitude(layer) is None:
        return "LyCORIS reads DoRA's magnitudes by rows only, and these are by columns"
    if not is_loadable(layer.algorithm):
        return f"LyCORIS cannot load {layer.algorithm} from a file"
    blocks = tensors.get("oft_blocks")
    if blocks is not None and blocks.shape[0] < blocks.shape[1]:
        return "LyCORIS makes at least as many blocks of OFT as a block has rows, and these are fewer"
    if layer.algorithm == "lokr" and not lycoris_can_load(tensors, layer.rank):
        return "LyCORIS splits a matrix of this size into other factors, and cannot load these"
    return None


misread = check_layers_with(lambda layer, path, keys: _cannot_rebuild(layer))
"""The layers that LyCORIS cannot load. It creates a module for each layer from the tensors' shapes and copies the
tensors into it."""

FORMAT = Format(
    write,
    read,
    readers={"lycoris": misread, "comfyui": misread_by_our_names},
    made_for=("lycoris", "comfyui"),
    all_families=("lycoris",),
    keeps_all=True,
)
