"""State parts: each component of a run saves and loads its own state, and the store does not know the components.

The state of a part consists of a JSON object and named tensors. The JSON object has its own `version`. When the owner
loads the state, it checks the version and rejects those that it does not support.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from gracetune.storage.safetensors_files import DTYPE_NAMES

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = ("manifest",)


@dataclass(frozen=True, eq=False)
class SavedState:
    """The state of a part. JSON cannot represent NaN, so such values must be tensors."""

    json: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class CheckpointPart(Protocol):
    """A component with state to save."""

    @property
    def name(self) -> str:
        """The name of its files: lower-case letters, digits and underscores."""

    def save(self) -> SavedState:
        """Return the state. All ranks call this in the same order, so it may gather sharded state. Only the result of
        rank 0 is written.

        The tensors need not be copies, because the store copies them before the run continues.
        """

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore a state that `save` returned. The tensors are on the CPU; this object may keep them."""


@dataclass(frozen=True, eq=False)
class StateSnapshot:
    """A copy of the state of one part, in host memory."""

    json: bytes
    tensors: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        """An upper bound of the size of its files, in whole disk blocks."""
        # 128 bytes per tensor: its entry in the header of the safetensors file.
        header = 64 + sum(len(name.encode()) + 128 for name in self.tensors)
        data = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        return sum(_blocks(size) for size in (len(self.json), header + data))


def snapshot(name: str, saved: SavedState) -> StateSnapshot:
    """Copy the state, so that the run can modify its tensors afterwards."""
    if "__metadata__" in saved.tensors:
        raise ValueError(f"{name!r} has a tensor called __metadata__, a name that safetensors reserves")
    return StateSnapshot(encoded_json(name, saved.json), {key: _host_copy(one) for key, one in saved.tensors.items()})


def saved_size(name: str, saved: SavedState) -> int:
    """The size of the files of a snapshot, without copying tensors."""
    return StateSnapshot(encoded_json(name, saved.json), saved.tensors).size


def check_names(names: Sequence[str]) -> None:
    for name in names:
        if _NAME.fullmatch(name) is None or name in _RESERVED:
            raise ValueError(f"a state part called {name!r}: expected lower-case letters, digits and underscores")
        if names.count(name) > 1:
            raise ValueError(f"two state parts are called {name!r}")


def encoded_json(name: str, value: Mapping[str, Any]) -> bytes:
    version = value.get("version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise ValueError(f"the state of {name!r} has no integer `version`")
    try:
        _reject_other_keys(value)
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the state of {name!r} is not plain JSON: {error}") from error


def _reject_other_keys(value: Any) -> None:
    """Raise TypeError for keys that are not strings, because json.dumps would silently turn the key 1 into "1"."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a key that is not a string: {key!r}")
            _reject_other_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _reject_other_keys(inner)


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"a checkpoint cannot store a tensor of {tensor.dtype}")
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor.detach())


def _blocks(size: int) -> int:
    return -(-size // 4096) * 4096
