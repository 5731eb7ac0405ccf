"""Streaming of the next expert's weights into memory that the active expert frees during its last backward pass.

When both experts do not fit, the next one could only be copied once its turn comes, and the device would wait for all
of it. But a backward pass visits blocks from the last to the first and does not need a block again afterwards. As each
block finishes, its memory is freed and filled with the next expert's weights, first block first. Blocks that have not
arrived when the expert's turn comes are waited for one by one, each just before it is called, so the first blocks
compute while the last ones are still being copied. Frozen weights are not copied back, because the host copy stays
valid, unless a checksum shows that something changed them (a merged adapter).
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
    """The frozen weights of a module in parts: one for everything outside its blocks, and one per block."""

    managed = 0

    def __init__(
        self, module: nn.Module, names: Collection[str], device: torch.device, lane: Lane,
        new_home: Callable[[int], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`names` are the class names of the blocks. `new_home(size)` allocates host memory; None uses pageable
        memory."""
        blocks = [part for part in module.modules() if type(part).__name__ in names]
        owners: dict[int, int] = {}
        for number, block in enumerate(blocks):
            for tensor in frozen_tensors(block):
                owners.setdefault(id(tensor), number)  # a tensor shared by two blocks belongs to the first
        shared: list[list[Tensor]] = [[] for _ in blocks]
        around: list[Tensor] = []
        for tensor in frozen_tensors(module):
            (shared[owners[id(tensor)]] if id(tensor) in owners else around).append(tensor)
        self.around, *self.blocks = (CopyParking.of(part, device, lane, new_home) for part in (around, *shared))
        self.trained = [[one for one in block.parameters() if one.requires_grad] for block in blocks]
        """Trained parameters of each block. Their gradients show how far a backward pass has come."""
        self.bytes = sum(part.bytes for part in self.parts)
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """The context entered around each wait for a block."""
        self.unchanged = False
        """Whether the device weights are known to equal the host copy until they are parked."""
        self._expected: deque[int] = deque()
        """Numbers of the blocks that have not been waited for yet."""
        for number, block in enumerate(blocks):
            before_each_call(block, partial(_arrive, weakref.ref(self), number))

    @classmethod
    def pinned(cls, module: nn.Module, names: Collection[str], device: torch.device) -> StreamedParking:
        registry = torch.cuda.cudart()
        return cls(module, names, device, CudaLane(device), lambda size: pinned_bytes(size, registry))

    @property
    def parts(self) -> Sequence[CopyParking]:
        """In the order in which a forward pass needs them."""
        return (self.around, *self.blocks)

    def start(self) -> None:
        for part in self.parts:
            part.start()

    def expect(self) -> None:
        """Like `finish`, but each block is waited for when it is called. Do not read its weights before that."""
        self.start()
        self.unchanged = False
        self.around.finish()
        for part in self.blocks:
            part.expect()
        self._expected = deque(range(len(self.blocks)))

    def finish(self) -> None:
        self.expect()
        self.arrive()

    def arrive(self, number: int | None = None) -> None:
        """Wait for this block and all before it, with which it may share weights. None waits for all blocks."""
        while self._expected and (number is None or self._expected[0] <= number):
            with self.waiting():
                self.blocks[self._expected.popleft()].finish()

    def park(self) -> None:
        self._expected.clear()
        for part in self.parts:
            part.park(unchanged=self.unchanged)

    def start_change_check(self) -> Callable[[], None]:
        """Start checking by checksum whether the device weights have changed, without a host synchronization.

        The returned function waits for the result and copies what changed to the host.
        """
        flags = torch.stack([part.has_changed() for part in self.parts])
        found = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=flags.is_cuda).copy_(flags, non_blocking=True)
        copied = torch.cuda.current_stream(flags.device).record_event() if flags.is_cuda else None

        def save_changes() -> None:
            if copied is not None:
                copied.synchronize()
            for part, changed in zip(self.parts, found.tolist(), strict=True):
                if changed:
                    part.copy_to_host()
            self.unchanged = True

        return save_changes


def _arrive(parking: weakref.ref[StreamedParking], number: int) -> None:
    """Takes a weak reference, so that the hook on a module does not keep its parked weights alive."""
    if (known := parking()) is not None:
        known.arrive(number)


def before_each_call(block: nn.Module, action: Callable[[], None]) -> None:
    """Run `action` before every call of the block, outside its compiled graph."""
    compiled = block._compiled_call_impl
    if compiled is None:
        block.register_forward_pre_hook(lambda _module, _inputs: action())
        return

    def called(*inputs: Any, **named: Any) -> Any:
        action()
        return compiled(*inputs, **named)

    block._compiled_call_impl = called


class StreamedSwap:
    """Context manager: while a backward pass of `leaving` runs, parks its finished blocks and brings `coming` in.

    A block is finished once a gradient has arrived in the block before it. In whatever order the compiler computes the
    gradients inside blocks, the gradient of the later block's input has been computed by then.
    """

    def __init__(self, leaving: StreamedParking, coming: StreamedParking) -> None:
        self._leaving, self._waiting = leaving, list(coming.parts)
        self._left = len(leaving.blocks)
        """How many blocks of `leaving` are still on the device."""
        self._room = 0
        """Bytes freed so far and not used yet."""
        self._hooks: list[RemovableHandle] = []
        self._save_changes: Callable[[], None] | None = None
        self.brought_bytes = 0

    def __enter__(self) -> StreamedSwap:
        self._save_changes = self._leaving.start_change_check()
        for number, parameters in enumerate(self._leaving.trained):
            for parameter in parameters:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._reached(number)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def moved(self) -> bool:
        """Whether any block of `leaving` has been parked."""
        return self._left < len(self._leaving.blocks)

    def _reached(self, number: int) -> Callable[[Tensor], None]:
        def reached(_parameter: Tensor) -> None:
            # A gradient in block `number` means that all later blocks are done. Before the first of them leaves, save
            # what changed: afterwards only the host copy is left.
            if self._left > number + 1 and self._save_changes is not None:
                self._save_changes()
                self._save_changes = None
            while self._left > number + 1:
                self._left -= 1
                part = self._leaving.blocks[self._left]
                part.park(unchanged=True)
                self._room += part.bytes
                self._bring()

        return reached

    def _bring(self) -> None:
        """Start copying the first parts that fit into the freed memory. The part outside the blocks may be larger than
        one block and wait."""
        while (part := next((one for one in self._waiting if one.bytes <= self._room), None)) is not None:
            try:
                part.start()
            except torch.OutOfMemoryError:  # freed memory is fragmented; the rest comes at the expert's turn
                self._waiting.clear()
                return
            self._waiting.remove(part)
            self._room -= part.bytes
            self.brought_bytes += part.bytes
