"""Sizes of a state that is kept in chunks (`chunked_adamw`), for plans. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from gracetune.config.run_config import OptimizerState, StatePrecision

CHUNK: Final = 64 << 20
"""Elements of a chunk. Copies of this size reach the full rate of the link."""
SLOTS: Final = 4
"""Chunks on the device at a time, of those that are streamed."""
BYTES: Final[Mapping[StatePrecision, int]] = MappingProxyType(
    {"fp32": 12, "bf16_moments": 8, "residual": 10, "residual_bf16_moments": 6}
)
"""Bytes for each parameter, beside the bf16 weight."""
_SCRATCH: Final[Mapping[StatePrecision, int]] = MappingProxyType(
    {"fp32": 0, "bf16_moments": 12, "residual": 8, "residual_bf16_moments": 20}
)
"""Bytes for each element of the largest chunk, for unpacked states during an update."""


def state_bytes(state: OptimizerState, elements: int) -> int:
    """Bytes of the state of this many parameters, wherever it is."""
    return BYTES[state.precision] * elements


def passing_bytes(state: OptimizerState, elements: int) -> int:
    """Device memory through which states pass: slots, if they are streamed, and memory for unpacked states."""
    largest = min(CHUNK, elements)
    slots = min(SLOTS, -(-elements // CHUNK)) if state.home == "streamed" else 0
    return largest * (slots * BYTES[state.precision] + _SCRATCH[state.precision])
