"""State parts: each component of a run saves and loads its own state, and the store does not know the components.

The state of a part consists of a JSON object and named tensors. The JSON object has its own `version`. When the owner
loads the state, it checks the version and rejects those that it does not support.

Also here: the interface to the processes of a run (`Ranks`), and the state part of the random number generators
(`RandomState`).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gracetune.checkpoint.errors import CheckpointError
from gracetune.errors import Problem
from gracetune.storage.safetensors_files import DTYPE_NAMES

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = ("manifest",)


@dataclass(frozen=True, eq=False)
class SavedState:
    """The state of a part. JSON cannot represent NaN, so such values must be tensors."""

    json: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    in_place: bool = False
    """The tensors are where the state lives and too large to copy: they are written before the run continues."""


class CheckpointPart(Protocol):
    """A component with state to save."""

    @property
    def name(self) -> str:
        """The name of its files: lower-case letters, digits and underscores."""

    def save(self) -> SavedState:
        """Return the state. All ranks call this in the same order, so it may gather sharded state. Only the result of
        rank 0 is written, except for a per-rank part.

        The tensors need not be copies, because the store copies or writes them before the run continues.
        """

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore a state that `save` returned. The tensors are on the CPU. This object may keep them, unless
        the caller of `Checkpoint.load` says that it copies them."""


@dataclass(frozen=True, eq=False)
class StateSnapshot:
    """A copy of the state of one part in host memory, or the state itself (`SavedState.in_place`)."""

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
    """Copy the state, so that the run can modify its tensors afterwards, unless it is to be written in place."""
    if "__metadata__" in saved.tensors:
        raise ValueError(f"{name!r} has a tensor called __metadata__, a name that safetensors reserves")
    for tensor in saved.tensors.values():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"a checkpoint cannot store a tensor of {tensor.dtype}")
    kept = saved.tensors if saved.in_place else {key: _host_copy(one) for key, one in saved.tensors.items()}
    return StateSnapshot(encoded_json(name, saved.json), kept)


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
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor.detach())


def _blocks(size: int) -> int:
    return -(-size // 4096) * 4096


# -- the processes of a run --------------------------------------------------------------------------------------------


class Ranks(Protocol):
    """The processes of a run."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, mine: bytes) -> list[bytes]:
        """The values of all ranks, in rank order. All ranks call this; only rank 0 uses the result."""


@dataclass(frozen=True)
class OneProcess:
    """A run with a single process."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]


# -- the state of the random number generators -------------------------------------------------------------------------


_RANDOM_VERSION = 1


class RandomState:
    """A per-rank state part, because each process has its own generators."""

    name = "random"

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is the device of the process. Only a CUDA device has a generator of its own."""
        self._cuda = device if device is not None and device.type == "cuda" else None

    def save(self) -> SavedState:
        version, words, gauss = random.getstate()
        # legacy=False returns a dictionary with names; the legacy form is a tuple.
        state: Any = np.random.get_state(legacy=False)
        tensors = {
            "python": torch.tensor(words, dtype=torch.int64),
            "numpy": torch.from_numpy(state["state"]["key"].astype(np.int64)),
            "torch": torch.get_rng_state(),
        }
        if self._cuda is not None:
            tensors["cuda"] = torch.cuda.get_rng_state(self._cuda)
        value = {
            "version": _RANDOM_VERSION,
            "python": {"version": version, "gauss": _hex(gauss)},
            "numpy": {
                "generator": state["bit_generator"],
                "position": int(state["state"]["pos"]),
                "has_gauss": int(state["has_gauss"]),
                "gauss": float(state["gauss"]).hex(),
            },
        }
        return SavedState(value, tensors)

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        if json["version"] != _RANDOM_VERSION:
            raise _rejected(f"version {json['version']}", f"version {_RANDOM_VERSION}")
        ours, theirs = random.getstate()[0], json["python"]["version"]
        if ours != theirs:
            raise _rejected(f"Python's generator of version {theirs}", f"version {ours}")
        random.setstate((theirs, tuple(tensors["python"].tolist()), _number(json["python"]["gauss"])))
        legacy = json["numpy"]
        np.random.set_state(  # the global one, which libraries use
            {
                "bit_generator": legacy["generator"],
                "state": {"key": tensors["numpy"].numpy().astype(np.uint32), "pos": legacy["position"]},
                "has_gauss": legacy["has_gauss"],
                "gauss": _number(legacy["gauss"]),
            }
        )
        torch.set_rng_state(tensors["torch"])
        # A run that moves between CPU and GPU cannot be continued to the bit; its GPU generator keeps its seed.
        if self._cuda is not None and "cuda" in tensors:
            torch.cuda.set_rng_state(tensors["cuda"], self._cuda)


def _hex(value: float | None) -> str | None:
    """Exact, as text."""
    return None if value is None else value.hex()


def _number(text: str | None) -> float | None:
    return None if text is None else float.fromhex(text)


def _rejected(found: str, expected: str) -> CheckpointError:
    hint = "resume with the release that saved it, or start anew with --resume none"
    return CheckpointError(Problem("state of the random number generators", found, expected, hint))
