"""State parts with a known value at every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gracetune.checkpoint.manifest import Metadata
from gracetune.checkpoint.reading import Checkpoint
from gracetune.checkpoint.resume import ResumeStart, open_requested
from gracetune.checkpoint.state_parts import SavedState
from gracetune.checkpoint.store import CheckpointStore

IDENTITY = {"name": "cats", "model": "wan t2v-14b"}
METADATA = Metadata(IDENTITY, "c0ffee", {"version": 2, "datasets": {}}, {"torch": "2.13.0"})


class Weights:
    """Tensors that are functions of the step, changed in place as in training."""

    def __init__(self, step: int = 0, size: int = 1000, name: str = "weights") -> None:
        self.name, self.step = name, step
        self.tensors = {"a.weight": torch.zeros(size), "b.weight": torch.zeros(size // 10, 3, dtype=torch.bfloat16)}
        self.move_to(step)

    def move_to(self, step: int) -> None:
        self.step = step
        for number, tensor in enumerate(self.tensors.values()):
            tensor.copy_(self._expected(tensor, number))

    def _expected(self, like: Tensor, number: int) -> Tensor:
        return torch.arange(like.numel()).remainder(251).add(self.step + number).reshape(like.shape).to(like.dtype)

    def is_right(self) -> bool:
        return all(torch.equal(one, self._expected(one, number)) for number, one in enumerate(self.tensors.values()))

    def save(self) -> SavedState:
        return SavedState({"version": 1, "step": self.step}, self.tensors)

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.step = json["step"]
        assert tensors.keys() == self.tensors.keys()
        self.tensors = dict(tensors)


class Counter:
    """A part that has only JSON."""

    def __init__(self, name: str = "counter", value: Any = None) -> None:
        self.name, self.value = name, value

    def save(self) -> SavedState:
        return SavedState({"version": 3, "value": self.value})

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        assert not tensors
        self.value = json["value"]


def write(store: CheckpointStore, *steps: int, size: int = 1000) -> None:
    for step in steps:
        store.write(step, [Weights(step, size), Counter(value=step)], metadata=METADATA)
    store.wait()


def filled(folder: Path, *steps: int, keep_last: int = 100) -> CheckpointStore:
    with CheckpointStore(folder, keep_last) as store:
        write(store, *steps)
    return CheckpointStore(folder, keep_last)


def begin(
    requested: str, store: CheckpointStore, identity: Mapping[str, str], *, allow_other_run: bool = False
) -> ResumeStart:
    """Open the requested checkpoint and take the folder, as a run does."""
    start = open_requested(requested, store, identity, allow_other_run=allow_other_run)
    return replace(start, notes=start.notes + store.begin(identity, start.checkpoint))


def check(checkpoint: Checkpoint, step: int, size: int = 1000) -> None:
    weights, counter = Weights(0, size), Counter()
    assert checkpoint.load([weights, counter]) == ()
    assert (checkpoint.step, weights.step, counter.value) == (step, step, step)
    assert weights.is_right()


def names(folder: Path) -> list[str]:
    """All file names except the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".gracetune.lock")
