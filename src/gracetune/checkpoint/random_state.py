"""The state of a process's random number generators: Python, NumPy, torch on the CPU and on its GPU."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gracetune.checkpoint.errors import CheckpointError
from gracetune.checkpoint.state_parts import SavedState
from gracetune.errors import Problem

VERSION = 1


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
            "version": VERSION,
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
        if json["version"] != VERSION:
            raise _rejected(f"version {json['version']}", f"version {VERSION}")
        ours, theirs = random.getstate()[0], json["python"]["version"]
        if ours != theirs:
            raise _rejected(f"Python's generator of version {theirs}", f"version {ours}")
        random.setstate((theirs, tuple(tensors["python"].tolist()), _number(json["python"]["gauss"])))
        legacy = json["numpy"]
        np.random.set_state(  # the global one: libraries draw from it
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
