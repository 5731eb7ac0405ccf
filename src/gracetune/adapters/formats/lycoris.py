"""LyCORIS' wrapper around a diffusers model: `lycoris_<diffusers path with underscores>`. It holds everything.

LoRA is LyCORIS' LoCon, and DoRA is LoCon with a dora_scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gracetune.adapters.algorithms.assembly import Convention
from gracetune.adapters.formats.reading import Reading, read_states
from gracetune.adapters.formats.record import Format
from gracetune.adapters.formats.writing import Spelling, Written, alpha_in, our_stems
from gracetune.adapters.formats.writing import write as write_with
from gracetune.adapters.state import AdapterState

CONVENTION = Convention(without_alpha="undefined", lora_is_locon=True)  # LyCORIS cannot rebuild a layer without alpha


def write(state: AdapterState, dtype: torch.dtype) -> Written:
    spelling = Spelling("lycoris", "down", lambda layer: alpha_in("lycoris", layer), lambda layer, path, keys: None)
    return write_with(state, dtype, spelling, our_stems("lycoris_", "_"))


def read(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], family: str) -> Reading:
    return read_states(tensors, metadata, family, CONVENTION)


FORMAT = Format(write, read)
