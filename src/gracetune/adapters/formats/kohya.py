"""kohya's scripts, musubi-tuner, LyCORIS for kohya: `lora_unet_<original path with underscores>`, always an alpha."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gracetune.adapters.algorithms.assembly import Convention
from gracetune.adapters.formats.reading import Reading, read_states
from gracetune.adapters.formats.record import Format
from gracetune.adapters.formats.writing import Spelling, Written, alpha_in, original_refusal, original_stems
from gracetune.adapters.formats.writing import write as write_with
from gracetune.adapters.state import AdapterState

CONVENTION = Convention(without_alpha="rank")  # sd-scripts' rule: no alpha is alpha = rank


def write(state: AdapterState, dtype: torch.dtype) -> Written:
    spelling = Spelling("kohya", "down", lambda layer: alpha_in("kohya", layer), original_refusal)
    return write_with(state, dtype, spelling, original_stems("lora_unet_", "_"))


def read(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], family: str) -> Reading:
    return read_states(tensors, metadata, family, CONVENTION)


FORMAT = Format(write, read)
