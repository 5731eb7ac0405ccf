"""AdamW for bf16 weights whose master weights and moments are larger than the GPU's memory.

The state is in chunks (`state_chunks`). A chunk is resident on the device, or streamed: it stays in pinned host memory
and passes through a slot on the device. One function updates a chunk wherever its state is, so resident and streamed
states give the same bits.

A step returns before its updates have run. They run in a queue of their own, in the order of the parameters, while
copies go in and out beside them. `wait_for` makes the current queue wait for the updates of some chunks; `waits_before`
returns the hooks that do it before the modules of a denoiser are called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gracetune.config.run_config import StatePrecision
from gracetune.optim.named_state import NamedState, StateMismatchError, differences, key_of
from gracetune.optim.state_chunks import Chunk, ChunkPart, GradientSums, chunks_of
from gracetune.optim.state_precision import LAYOUTS, MASTER, RESIDUAL, Scratch, first_state, pack, unpack
from gracetune.optim.state_sizes import CHUNK, SLOTS
from gracetune.optim.state_streams import (
    NewMemory,
    SlotRing,
    current_queue,
    host_blocks,
    host_memory,
    new_queue,
)
from gracetune.seeded_random import torch_seed
from gracetune.units import format_bytes

_VERSION: Final = 1
_REMEDY: Final = "resume with the config the state was saved with, or start anew (--resume none)"


@dataclass(frozen=True)
class StateChoice:
    """Where the optimizer's state is, and in which precision."""

    precision: StatePrecision = "fp32"
    resident_bytes: int = 0
    """State that stays on the device; the rest is streamed."""
    slots: int = SLOTS
    """Chunks on the device at a time, of those that are streamed."""
    chunk_elements: int = CHUNK
    new_memory: NewMemory | None = None
    """Allocates host memory; None pins new memory for a GPU."""


RESIDENT: Final = 1 << 62
"""`resident_bytes` with which everything is resident."""


class ChunkedAdamW(Optimizer):
    _step_supports_amp_scaling = True
    """torch's marker for optimizers that skip a step while `found_inf` is 1 (`optim.step_skipping`)."""
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: StateChoice | None = None,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                "expected lr, eps and weight_decay of 0 or more and betas in [0, 1); "
                f"found lr {lr}, eps {eps}, weight_decay {weight_decay} and betas {betas}"
            )
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        choice = state or StateChoice()
        self._precision = choice.precision
        self._named = [_named(group) for group in self.param_groups]
        self.chunks = chunks_of(
            self._named, LAYOUTS[choice.precision], resident_bytes=choice.resident_bytes, limit=choice.chunk_elements
        )
        self.sums = [
            GradientSums([chunk for chunk in self.chunks if chunk.group == number])
            for number in range(len(self.param_groups))
        ]
        self.device = device = self.chunks[0].parts[0].parameter.device
        streamed = [chunk for chunk in self.chunks if chunk.home == "streamed"]
        self._homes = host_blocks(streamed, choice.new_memory or host_memory(device))
        self._ring = SlotRing(streamed, self._homes, device, choice.slots)
        self._scratch = Scratch(max(chunk.elements for chunk in self.chunks), device)
        self._updates = new_queue(device)
        self._marks: dict[int, Any] = {}
        self._awaited = [-1] * len(self.param_groups)
        """The last chunk of each group that the current queue waits for."""
        self._loading: int | None = None
        """The group whose chunks are loaded ahead of its step."""
        self._generator = torch.Generator(device)
        self._calls = 0
        self._found = torch.zeros((), device=device)
        self._steps = [torch.zeros((), device=device) for _ in self.param_groups]
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        staging = self._ring.memory
        for chunk in self.chunks:
            if chunk.home == "resident":
                self._homes[chunk.number] = torch.empty(chunk.size, dtype=torch.uint8, device=self.device)
                first_state(chunk.layout.views(self._homes[chunk.number], chunk.elements), chunk.weights())
                continue
            block = staging[0][: chunk.size].zero_()
            first_state(chunk.layout.views(block, chunk.elements), chunk.weights())
            self._homes[chunk.number].copy_(block)

    # -- a step -------------------------------------------------------------------------------------------------------

    def load_ahead(self, number: int) -> None:
        """Start copying the first streamed chunks of a group to the device. Call it while a step of it computes."""
        if self._loading != number:
            self._ring.drop()
            self._loading = number
        for chunk in self._streamed(number):
            if not self._ring.room:
                return
            self._ring.load(chunk)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._calls += 1
        if self.found_inf is None:
            self._found.zero_()
        else:
            self._found.copy_(self.found_inf)
        for number, sums in enumerate(self.sums):
            if sums.filled:
                self._step_group(number, sums)
        return loss

    def _step_group(self, number: int, sums: GradientSums) -> None:
        self.load_ahead(number)
        upcoming = deque(chunk for chunk in self._streamed(number) if not self._ring.holds(chunk))
        self._updates.wait(current_queue(self.device).mark())
        with self._updates.running():
            self._steps[number].add_(1 - self._found)
        for chunk, gradient in zip(sums.chunks, sums.sums, strict=True):
            is_streamed = chunk.home == "streamed"
            block = self._ring.take(chunk, self._updates) if is_streamed else self._homes[chunk.number]
            with self._updates.running():
                self._update(chunk, block, gradient, sums.divisor)
            self._marks[chunk.number] = self._updates.mark()
            if is_streamed:
                self._ring.release(chunk, self._marks[chunk.number])
                if upcoming:
                    self._ring.load(upcoming.popleft())
        sums.filled = False
        self._awaited[number] = -1
        self._loading = None

    def _update(self, chunk: Chunk, block: Tensor, gradient: Tensor, divisor: Tensor) -> None:
        """Update one chunk: its state, its weights, and the gradient sum, which becomes 0 for the next step."""
        group = self.param_groups[chunk.group]
        packed, weights = chunk.layout.views(block, chunk.elements), chunk.weights()
        master, first, second = unpack(packed, weights, self._scratch)
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            [master], [gradient], [first], [second], [], [self._steps[chunk.group]],
            lr=float(group["lr"]), beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
            amsgrad=False, maximize=False, grad_scale=divisor, found_inf=self._found,
        )  # fmt: skip
        self._generator.manual_seed(torch_seed(0, "second moment", self._calls, chunk.number))
        pack(master, first, second, packed, weights, self._scratch, self._generator)
        gradient.zero_()

    def _streamed(self, number: int) -> list[Chunk]:
        return [chunk for chunk in self.sums[number].chunks if chunk.home == "streamed"]

    # -- waiting for updates ------------------------------------------------------------------------------------------

    def wait_for(self, number: int) -> None:
        """Make the current queue wait for the updates of this chunk and all earlier ones of its group."""
        group = self.chunks[number].group
        if number > self._awaited[group]:
            current_queue(self.device).wait(self._marks.get(number))
            self._awaited[group] = number

    def wait_for_all(self) -> None:
        """Make the current queue wait for all updates: weights are up to date for work that is queued from now on."""
        for sums in self.sums:
            self.wait_for(sums.chunks[-1].number)

    def last_chunk(self, parameters: Collection[Tensor]) -> int | None:
        """The last chunk that holds any of these parameters; None if none does."""
        wanted = {id(parameter) for parameter in parameters}
        found = [chunk.number for chunk in self.chunks if any(id(one.parameter) in wanted for one in chunk.parts)]
        return max(found, default=None)

    def differs_from_weight(self, parameter: Tensor) -> bool:
        """Whether the master of this parameter is anything else than the rounded weight. The host waits."""
        self.settle()
        return any(
            bool(fields[RESIDUAL].any() if RESIDUAL in fields else (fields[MASTER] != weight.float()).any())
            for chunk in self.chunks
            for part in chunk.parts
            if part.parameter is parameter
            for fields in [{name: part.of(flat) for name, flat in self._fields(chunk).items()}]
            for weight in [part.weight.to(self._homes[chunk.number].device)]
        )

    # -- state by name ------------------------------------------------------------------------------------------------

    def state_tensors(self) -> list[Tensor]:
        return [*self._homes.values(), *self._ring.memory]

    @property
    def device_bytes(self) -> int:
        """Bytes of states and slots on the device."""
        resident = sum(chunk.size for chunk in self.chunks if chunk.home == "resident")
        return resident + sum(memory.nbytes for memory in self._ring.memory)

    @property
    def host_bytes(self) -> int:
        return sum(chunk.size for chunk in self.chunks if chunk.home == "streamed")

    @property
    def line(self) -> str:
        """Where the state is, in words."""
        resident = sum(chunk.size for chunk in self.chunks if chunk.home == "resident")
        slots = len(self._ring.memory)
        places = [f"{format_bytes(resident)} resident"] if resident else []
        if self.host_bytes:
            places.append(f"{format_bytes(self.host_bytes)} streamed from host memory through {slots} slots")
        return f"optimizer state: {self._precision}, {' and '.join(places)}; the weights stay in 16 bits on the device"

    def settle(self) -> None:
        """Make the host wait until all updates are done and the homes hold them."""
        self._updates.settle()
        self._ring.settle()

    def named_state(self) -> NamedState:
        """The state as views of where it lives. It must not be changed or trained on until it is copied."""
        self.settle()
        tensors = {
            key_of(part.name, f"{field}@{part.start}"): part.of(flat)
            for chunk in self.chunks
            for field, flat in self._fields(chunk).items()
            for part in chunk.parts
        }
        steps = [float(step) for step in self._steps]
        return NamedState(
            tensors, {"optimizer": type(self).__name__, "format": _VERSION, "steps": steps, "calls": self._calls}
        )

    @torch.no_grad()
    def load_named_state(self, state: NamedState) -> None:
        """Load strictly. Chunks and homes may differ from those that saved the state."""
        found = state.json.get("optimizer")
        if found != type(self).__name__ or state.json["format"] != _VERSION:
            raise StateMismatchError(f"this is the state of {found!r}, not of {type(self).__name__!r}; {_REMEDY}")
        saved = _saved_parts(state.tensors)
        ours = {
            f"{name}:{field}": (parameter.numel(), dtype)
            for number, group in enumerate(self._named)
            for name, parameter in group.items()
            for field, dtype in self._layout_of(number, parameter).items()
        }
        theirs = {key: (sum(one.numel() for _, one in parts), parts[0][1].dtype) for key, parts in saved.items()}
        wrong = differences(ours, theirs)
        if wrong or len(state.json["steps"]) != len(self._steps):
            raise StateMismatchError(f"this optimizer state is of other parameters or precision:\n{wrong}\n{_REMEDY}")
        self.settle()
        self._ring.drop()
        self._loading = None
        for chunk in self.chunks:
            for field, flat in self._fields(chunk).items():
                for part in chunk.parts:
                    _fill(part, part.of(flat), saved[f"{part.name}:{field}"])
        for step, value in zip(self._steps, state.json["steps"], strict=True):
            step.fill_(value)
        self._calls = state.json["calls"]

    def _fields(self, chunk: Chunk) -> dict[str, Tensor]:
        return chunk.layout.views(self._homes[chunk.number], chunk.elements)

    def _layout_of(self, number: int, parameter: Tensor) -> Mapping[str, torch.dtype]:
        alike = (one for one in self.sums[number].chunks if one.parts[0].parameter.dtype == parameter.dtype)
        return next(alike).layout.fields


def _named(group: Mapping[str, Any]) -> dict[str, Tensor]:
    names = group.get("param_names", [str(number) for number in range(len(group["params"]))])
    return dict(zip(names, group["params"], strict=True))


def _saved_parts(tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[int, Tensor]]]:
    """`parameter:field` -> its parts, each with the first element."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for key, tensor in tensors.items():
        name, _, start = key.rpartition("@")
        parts.setdefault(name, []).append((int(start), tensor))
    return parts


def _fill(part: ChunkPart, into: Tensor, saved: Sequence[tuple[int, Tensor]]) -> None:
    """Copy what saved tensors, each with its first element, hold of this part."""
    for start, tensor in saved:
        first, last = max(part.start, start), min(part.stop, start + tensor.numel())
        if first < last:
            into[first - part.start : last - part.start].copy_(tensor[first - start : last - start])
