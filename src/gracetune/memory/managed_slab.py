"""A slab of managed memory, the counterpart of `hostmem.slab`. The caller chooses its preferred location."""

from __future__ import annotations

from gracetune.hostmem.hint import Hint
from gracetune.memory.managed import Home, ManagedBuffer, ManagedHeap


class ManagedSlab:
    """A slab that CPU and GPU can both access, wherever its pages are."""

    def __init__(self, heap: ManagedHeap, size: int, home: Home) -> None:
        import torch

        self._buffer: ManagedBuffer = heap.empty((max(size, 1),), torch.uint8, home)
        self.home = home
        self.host = self._buffer.cpu()
        self.view = self._buffer.cuda()
        self.notes: tuple[str, ...] = ()

    def settle(self) -> None:
        """Move pages to the device if they belong there. The CPU has written them, so they are in host memory."""
        import torch

        if self.home == "device":
            stream = torch.cuda.current_stream(self._buffer.device)
            self._buffer.prefetch("device", stream.cuda_stream)
            stream.synchronize()

    def move(self, home: Home, stream: int) -> Hint:
        """Change the preferred location and start the migration on a CUDA stream. Reads stay correct meanwhile."""
        hint = self._buffer.rehome(home)
        if hint:
            self._buffer.prefetch(home, stream)
            self.home = home
        return hint

    def close(self) -> None:
        import torch

        self.host = self.view = torch.empty(0, dtype=torch.uint8)
        self._buffer.close()
