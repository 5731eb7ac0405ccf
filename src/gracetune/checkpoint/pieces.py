"""State has an owner: each part of a run saves and loads its own piece; the store knows none of them.

A piece is JSON and named tensors. The JSON is an object that carries a `version` of its own, which the owner checks
when it loads: what a release does not understand it refuses.
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
class Saved:
    """What a piece is made of. JSON knows no NaN: such a number belongs into a tensor."""

    json: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Piece(Protocol):
    @property
    def name(self) -> str:
        """Lower case letters, digits and underscores; the name of its files."""

    def save(self) -> Saved:
        """Called by all ranks in the same order, so it may gather what is sharded; rank 0's answer is written.

        The tensors need not be copies: the store copies them before it returns.
        """

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over what `save` gave. The tensors are on the CPU and belong to the piece from here on."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A piece as it was at one moment, in host memory."""

    json: bytes
    tensors: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        """Of its files, rounded up to whole blocks."""
        header = 64 + sum(len(name.encode()) + 128 for name in self.tensors)
        data = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        return sum(_blocks(size) for size in (len(self.json), header + data))


def snapshot(name: str, saved: Saved) -> Snapshot:
    """Copies: what the run does to its tensors afterwards changes nothing here."""
    if "__metadata__" in saved.tensors:
        raise ValueError(f"{name!r} has a tensor called __metadata__, a name safetensors keeps for itself")
    return Snapshot(encoded_json(name, saved.json), {key: _host_copy(one) for key, one in saved.tensors.items()})


def saved_size(name: str, saved: Saved) -> int:
    """What a snapshot of it will take on the disk, without making one."""
    return Snapshot(encoded_json(name, saved.json), saved.tensors).size


def check_names(names: Sequence[str]) -> None:
    for name in names:
        if _NAME.fullmatch(name) is None or name in _RESERVED:
            raise ValueError(f"a piece of state called {name!r}: lower case letters, digits and underscores")
        if names.count(name) > 1:
            raise ValueError(f"two pieces of state are called {name!r}")


def encoded_json(name: str, value: Mapping[str, Any]) -> bytes:
    version = value.get("version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise ValueError(f"the state of {name!r} has no whole number as its `version`")
    try:
        _refuse_other_keys(value)
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the state of {name!r} is not plain JSON: {error}") from error


def _refuse_other_keys(value: Any) -> None:
    """JSON would turn the key 1 into "1" without a word."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a key that is no text: {key!r}")
            _refuse_other_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _refuse_other_keys(inner)


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"a checkpoint cannot hold a tensor of {tensor.dtype}")
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor.detach())


def _blocks(size: int) -> int:
    return -(-size // 4096) * 4096
