"""One expert's weights take the place of another's while that one's last backward pass still runs, block by block.

Where both do not fit, the next expert could only be brought when its turn has come, and the device would wait for all
of it. But a backward pass goes through its blocks from the last to the first and needs none of them again: each one's
memory can be filled with the next expert's blocks, the first one first. What has not come when the next expert's turn
has is waited for block by block, each when it is called: the first ones work while the last are still on their way.
Frozen weights are never copied back: their home on the host stays.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gracetune.models.parking import CopyParking, CudaLane, Lane, frozen_tensors, pinned_bytes


class StreamedParking:
    """The frozen weights of a module in pieces: what is around its blocks, and each block for itself."""

    managed = 0

    def __init__(
        self, module: nn.Module, names: Collection[str], device: torch.device, lane: Lane,
        new_home: Callable[[int], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`names` are the classes of the blocks. `new_home` gives host memory of so many bytes; None: pageable."""
        blocks = [part for part in module.modules() if type(part).__name__ in names]
        owners: dict[int, int] = {}
        for number, block in enumerate(blocks):
            for tensor in frozen_tensors(block):
                owners.setdefault(id(tensor), number)  # what two blocks share is the first one's
        shared: list[list[Tensor]] = [[] for _ in blocks]
        around: list[Tensor] = []
        for tensor in frozen_tensors(module):
            (shared[owners[id(tensor)]] if id(tensor) in owners else around).append(tensor)
        self.around, *self.blocks = (CopyParking.of(part, device, lane, new_home) for part in (around, *shared))
        self.trained = [[one for one in block.parameters() if one.requires_grad] for block in blocks]
        self.bytes = sum(piece.bytes for piece in self.pieces)
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """Around each wait for a block."""
        self.unchanged = False
        """Somebody has made sure of it since they came, and nobody changes them until they leave."""
        self._expected: deque[int] = deque()
        for number, block in enumerate(blocks):
            _before_each_call(block, partial(_arrive, weakref.ref(self), number))

    @classmethod
    def pinned(cls, module: nn.Module, names: Collection[str], device: torch.device) -> StreamedParking:
        registry = torch.cuda.cudart()
        return cls(module, names, device, CudaLane(device), lambda size: pinned_bytes(size, registry))

    @property
    def pieces(self) -> Sequence[CopyParking]:
        """In the order a forward pass needs them."""
        return (self.around, *self.blocks)

    def start(self) -> None:
        for piece in self.pieces:
            piece.start()

    def expect(self) -> None:
        """As `finish`, for who calls the blocks next: each one's weights are waited for then, and until then nobody is
        to read them."""
        self.start()
        self.unchanged = False
        self.around.finish()
        for piece in self.blocks:
            piece.expect()
        self._expected = deque(range(len(self.blocks)))

    def finish(self) -> None:
        self.expect()
        self.arrive()

    def arrive(self, number: int | None = None) -> None:
        """This block and those before it, with which it may share weights; or all of them."""
        while self._expected and (number is None or self._expected[0] <= number):
            with self.waiting():
                self.blocks[self._expected.popleft()].finish()

    def park(self) -> None:
        self._expected.clear()
        for piece in self.pieces:
            piece.park(unchanged=self.unchanged)

    def ask_for_changes(self) -> Callable[[], None]:
        """Called later, what this returns sees to it that changes are kept. The host has not waited in between."""
        flags = torch.stack([piece.changed() for piece in self.pieces])
        answer = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=flags.is_cuda).copy_(flags, non_blocking=True)
        answered = torch.cuda.current_stream(flags.device).record_event() if flags.is_cuda else None

        def keep() -> None:
            if answered is not None:
                answered.synchronize()
            for piece, changed in zip(self.pieces, answer.tolist(), strict=True):
                if changed:
                    piece.keep()
            self.unchanged = True

        return keep


def _arrive(parking: weakref.ref[StreamedParking], number: int) -> None:
    """Weakly, so that a module does not keep the memory its weights were parked in."""
    if (known := parking()) is not None:
        known.arrive(number)


def _before_each_call(block: nn.Module, action: Callable[[], None]) -> None:
    """Outside of what was compiled: the compiler would make a part of the graph of it."""
    compiled = block._compiled_call_impl
    if compiled is None:
        block.register_forward_pre_hook(lambda _module, _inputs: action())
        return

    def called(*inputs: Any, **named: Any) -> Any:
        action()
        return compiled(*inputs, **named)

    block._compiled_call_impl = called


class Following:
    """While a backward pass of `leaving` runs in here, `coming` moves in behind it.

    A block is done when a gradient has arrived in the block before it: whatever the compiler made of both, the input's
    gradient of the one has been computed by then.
    """

    def __init__(self, leaving: StreamedParking, coming: StreamedParking) -> None:
        self._leaving, self._waiting = leaving, list(coming.pieces)
        self._left = len(leaving.blocks)
        self._room = 0
        self._hooks: list[RemovableHandle] = []
        self._keep_changes: Callable[[], None] | None = None
        self.brought_bytes = 0

    def __enter__(self) -> Following:
        self._keep_changes = self._leaving.ask_for_changes()
        for number, parameters in enumerate(self._leaving.trained):
            for parameter in parameters:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._reached(number)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def moved(self) -> bool:
        """Something of `leaving` is gone."""
        return self._left < len(self._leaving.blocks)

    def _reached(self, number: int) -> Callable[[Tensor], None]:
        def reached(_parameter: Tensor) -> None:
            if self._left > number + 1 and self._keep_changes is not None:
                self._keep_changes()
                self._keep_changes = None
            while self._left > number + 1:
                self._left -= 1
                piece = self._leaving.blocks[self._left]
                piece.park(unchanged=True)
                self._room += piece.bytes
                self._bring()

        return reached

    def _bring(self) -> None:
        """The first that fits into what was given up: what is around the blocks may be larger than one of them."""
        while (piece := next((one for one in self._waiting if one.bytes <= self._room), None)) is not None:
            try:
                piece.start()
            except torch.OutOfMemoryError:  # memory in other pieces than these: the rest comes when its turn does
                self._waiting.clear()
                return
            self._waiting.remove(piece)
            self._room -= piece.bytes
            self.brought_bytes += piece.bytes
