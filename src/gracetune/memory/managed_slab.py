"""A slab of managed memory: the counterpart of `hostmem.slab`, with its home where the caller says."""

from __future__ import annotations

from gracetune.hostmem.hint import Hint
from gracetune.memory.managed import Home, ManagedBuffer, ManagedHeap


class ManagedSlab:
    """Managed memory: the GPU reads it where it lies."""

    def __init__(self, heap: ManagedHeap, size: int, home: Home) -> None:
        import torch

        self._buffer: ManagedBuffer = heap.empty((max(size, 1),), torch.uint8, home)
        self.home = home
        self.host = self._buffer.cpu()
        self.view = self._buffer.cuda()
        self.notes: tuple[str, ...] = ()

    def settle(self) -> None:
        """The CPU wrote the pages, so that is where they lie: those that belong on the device go there once."""
        import torch

        if self.home == "device":
            stream = torch.cuda.current_stream(self._buffer.device)
            self._buffer.prefetch("device", stream.cuda_stream)
            stream.synchronize()

    def move(self, home: Home, stream: int) -> Hint:
        """Prefer another home from now on, and start moving there on a CUDA stream. Batches are right meanwhile."""
        hint = self._buffer.rehome(home)
        if hint:
            self._buffer.prefetch(home, stream)
            self.home = home
        return hint

    def close(self) -> None:
        import torch

        self.host = self.view = torch.empty(0, dtype=torch.uint8)
        self._buffer.close()
