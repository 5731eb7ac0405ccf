"""Bytes of a forward and backward pass: what autograd saves, and what is alive at the peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class SavedTensors:
    """The storages that autograd saves, each counted once, with the size of an element."""

    bytes_by_storage: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Storage -> its bytes, and bytes per element of the tensor that was saved."""
    _held: list[torch.UntypedStorage] = field(default_factory=list)

    def add(self, tensor: Tensor) -> None:
        if tensor.dtype == torch.uint64:  # the state of attention's random generator
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self.bytes_by_storage:
            self._held.append(storage)  # its address must not be used again
            self.bytes_by_storage[storage._cdata] = storage.nbytes(), tensor.element_size()

    @property
    def total(self) -> int:
        return sum(size for size, _ in self.bytes_by_storage.values())


@contextmanager
def saved_tensors(uncounted: Iterable[Tensor], counts: Callable[[], bool] = lambda: True) -> Iterator[SavedTensors]:
    """Collect what autograd saves, without the storages of `uncounted`, while `counts` is true."""
    left_out = {tensor.untyped_storage()._cdata for tensor in uncounted}
    found = SavedTensors()

    def pack(tensor: Tensor) -> Tensor:
        if counts() and tensor.untyped_storage()._cdata not in left_out:
            found.add(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


class AliveTensors(TorchDispatchMode):
    """Counts the bytes of storages created while it is active: those that are alive, and their peak."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._existing = [tensor.untyped_storage() for tensor in existing]
        self._uncounted = {storage._cdata for storage in self._existing}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._uncounted or key in self._alive:
            return

        def gone(_reference: object) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
