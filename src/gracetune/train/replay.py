"""A denoiser's forward and backward pass recorded once and replayed, where Python is slower than the GPU.

    predict = Replay(spec, {denoiser: gradients}, say=view.say)    # called as `models.spec.Predict`
    answer = predict(denoiser, noisy, level, batch, facts)
    answer.sum().backward()                                        # adds to the window's gradients

A model of many small kernels keeps a GPU waiting for their launches. A recording is two CUDA graphs, which launch all
of them at once: the same kernels on the same places in memory, so the same numbers. It is for one denoiser and one
shape of everything that goes in, and it holds the activations' memory until it is let go.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gracetune.errors import MachineError
from gracetune.models.spec import ModelFacts, ModelSpec
from gracetune.train.gradients import FlatGradients
from gracetune.units import GIB, format_bytes, format_duration

PROBES: Final = 2
"""Passes after which the GPU is asked whether it had to wait; the first one of a shape compiles, and says nothing."""
MOST: Final = 16
"""Recordings at a time: each has memory of its own beside what they share."""
ROOM: Final = 1.3
"""Times what is kept for the backward pass: what a step is given room for, and a GiB."""
STATES: Final = 4
"""Times the gradients: what an optimizer makes in its first step, and works with in every one."""
WORTH: Final = 20
"""Replays that make up for the time of a recording, by a rough count."""
_PROBE_S: Final = 1e-3
"""A GPU with so little left to do, when all of a forward pass is launched, waits for Python most of the time."""

Key = tuple[object, ...]
Run = Callable[[Sequence[Tensor]], Tensor]


@dataclass(eq=False)
class Turns:
    """The memory that all recordings share: only one is ever between its forward and its backward pass."""

    pool: Any
    taken: int = 0
    size: int = 0
    """Bytes."""


class Recording:
    """What a forward and a backward pass do, in memory that does not move."""

    def __init__(
        self, inputs: Sequence[Tensor], answer: Tensor, gradient: Tensor, graphs: tuple[Any, Any], turns: Turns
    ) -> None:
        self._answer, self._gradient, self._turns = answer, gradient, turns
        self._inputs, (self._forward, self._backward) = inputs, graphs

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, int]:
        """The answer, and whose turn it is now."""
        for place, given in zip(self._inputs, inputs, strict=True):
            place.copy_(given)
        self._turns.taken += 1
        self._forward.replay()
        return self._answer.detach(), self._turns.taken

    def backward(self, gradient: Tensor, turn: int) -> None:
        if turn != self._turns.taken:
            raise RuntimeError("another recorded forward pass was replayed before the backward pass of this one")
        self._gradient.copy_(gradient)
        self._backward.replay()


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recording: Recording, inputs: Sequence[Tensor]) -> Tensor:
        """`anchor` needs a gradient, so that autograd comes back here; it gets none."""
        answer, ctx.turn = recording.forward(inputs)
        ctx.recording = recording
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.recording.backward(gradient, ctx.turn)
        return None, None, None


class Gpu:
    """What is asked of the device; CUDA's current one."""

    def finish(self) -> None:
        """All it was given."""
        torch.cuda.synchronize()

    def waits(self) -> bool:
        """Whether it is done with what it was given, or nearly."""
        event = torch.cuda.Event()
        event.record()
        time.sleep(_PROBE_S)
        return bool(event.query())

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        """In here, what makes this thread wait for the device ends up in the list: a recording can have none of it."""
        found: list[str] = []
        thread, before = threading.get_ident(), torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            shown = warnings.showwarning

            def show(message: Warning | str, *others: Any, **more: Any) -> None:
                text = str(message)
                if "synchronizing CUDA operation" in text:
                    if threading.get_ident() == thread:
                        found.append(text)
                elif "Synchronization debug mode is a prototype" not in text:  # torch says so when it is asked to watch
                    shown(message, *others, **more)

            warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
            warnings.showwarning = show
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def held(self) -> int:
        return torch.cuda.memory_allocated()

    def free(self) -> int:
        """With what is only kept for later given back."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(self, run: Run, inputs: Sequence[Tensor], gradients: FlatGradients, turns: Turns) -> Recording:
        """Nothing is computed: that is what the first replay does."""
        places, pool = [one.clone() for one in inputs], turns.pool
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads may go on with their own work: they read ahead.
        with torch.cuda.graph(forward, pool=pool, capture_error_mode="thread_local"):
            answer = run(places)
        gradient = torch.empty_like(answer)
        # Autocast is for forward passes; autograd's own are never in it.
        with (
            torch.cuda.graph(backward, pool=pool, capture_error_mode="thread_local"),
            torch.autocast(answer.device.type, enabled=False),
        ):
            gradients.add(torch.autograd.grad((answer,), gradients.parameters, (gradient,), allow_unused=True))
        return Recording(places, answer.detach(), gradient, (forward, backward), turns)


@dataclass(eq=False)
class _Shape:
    """What is known of one denoiser and one shape."""

    latents: torch.Size
    passes: int = 0
    kept: int = 0
    """Bytes a forward pass leaves for the backward pass."""
    refused: bool = False
    beside: int = -1
    """The size of all recordings when there was room beside them."""
    recording: Recording | None = None
    tensors: Sequence[Tensor] = ()
    """The denoiser's, and where they were when it was recorded:"""
    places: Sequence[int] = ()


class Replay:
    def __init__(
        self,
        spec: ModelSpec,
        gradients: Mapping[nn.Module, FlatGradients],
        *,
        say: Callable[[str], None] = lambda text: None,
        gpu: Gpu | None = None,
    ) -> None:
        """`gradients` are those of each denoiser that may be recorded; others are called as ever."""
        assert spec.recorded_inputs is not None, "families that were never recorded are not"
        self._predict, self._recorded_inputs, self._gradients = spec.predict, spec.recorded_inputs, gradients
        self._say, self._gpu = say, gpu or Gpu()
        self._shapes: dict[Key, _Shape] = {}
        self._turns: Turns | None = None
        self._anchor: Tensor | None = None
        self._off = False
        self._made = self._replayed = 0
        self._said: set[str] = set()

    def __call__(
        self, denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
    ) -> Tensor:
        """See `models.spec.Predict`. With gradients, the answer's backward pass is to come before the next call."""
        gradients = self._gradients.get(denoiser)
        if gradients is None or self._off or not torch.is_grad_enabled():
            return self._predict(denoiser, noisy, level, batch, facts)
        needed = self._recorded_inputs(batch)
        names, inputs = sorted(needed), [noisy, level, *(needed[name] for name in sorted(needed))]

        def run(given: Sequence[Tensor]) -> Tensor:
            return self._predict(denoiser, given[0], given[1], dict(zip(names, given[2:], strict=True)), facts)

        key = (id(denoiser), denoiser.training, *names, *((one.shape, one.dtype, one.device) for one in inputs))
        shape = self._shapes.setdefault(key, _Shape(noisy.shape))
        if shape.recording is not None and shape.places != _places(shape.tensors):
            self.release()  # it would read what is there now
        if shape.recording is None and shape.passes > PROBES and not shape.refused:
            self._make(shape, run, inputs, denoiser, gradients)
        if shape.recording is not None:
            self._replayed += 1
            answer: Tensor = _Replayed.apply(self._anchor, shape.recording, inputs)  # type: ignore[no-untyped-call]
            return answer
        return self._launched(shape, run, inputs)

    def release(self) -> None:
        """For who needs the memory, or moves weights. What comes next is recorded again."""
        if self._turns is None:
            return
        self._gpu.finish()  # replays that wait for their turn use that memory
        for shape in self._shapes.values():
            shape.recording, shape.tensors = None, ()
        self._turns = None
        self._gpu.free()

    def _launched(self, shape: _Shape, run: Run, inputs: Sequence[Tensor]) -> Tensor:
        """Kernel by kernel, as without recordings."""
        self._make_room(shape)
        # Graphs of blocks remember of a view what it is a view of: they are to meet what will be recorded.
        given = [one.clone() if one._is_view() else one for one in inputs]
        shape.passes += 1
        if shape.refused or shape.passes == 1:
            return run(given)
        self._gpu.finish()  # earlier steps' work says nothing about this one
        before = self._gpu.held()
        with self._gpu.watched() as waited:
            answer = run(given)
        shape.kept = self._gpu.held() - before
        if waited:
            self._refuse(shape, "the model waits for the GPU in its forward pass")
        elif not self._gpu.waits():
            self._refuse(shape, "the GPU has work left when all of a forward pass is launched")
        return answer

    def _make_room(self, shape: _Shape) -> None:
        """Recordings hold what a step keeps, and this one needs as much beside them."""
        if self._turns is None or shape.beside == self._turns.size:
            return
        known = max(self._shapes.values(), key=lambda one: one.kept)
        expected = shape.kept or known.kept * max(1.0, shape.latents.numel() / known.latents.numel())
        if self._gpu.free() >= ROOM * expected + GIB:
            shape.beside = self._turns.size
            return
        self.release()
        if shape.refused:  # it is never recorded, and would take their memory every time
            self._turn_off("there is no room for it beside samples of other shapes")
        elif self._made > PROBES and self._replayed < WORTH * self._made:
            self._turn_off("samples of many shapes take the memory from each other")

    def _make(
        self, shape: _Shape, run: Run, inputs: Sequence[Tensor], denoiser: nn.Module, gradients: FlatGradients
    ) -> None:
        if sum(one.recording is not None for one in self._shapes.values()) == MOST:
            self._refuse(shape, f"{MOST} other shapes are recorded")
            return
        began, free = time.perf_counter(), self._gpu.free()
        turns = self._turns or Turns(self._gpu.pool())
        returned = sum(one.numel() * one.element_size() for one in gradients.parameters)
        there = turns.size if any(one.recording and one.kept >= shape.kept for one in self._shapes.values()) else 0
        states = 0 if shape.places else STATES * returned  # who was recorded before has made them since
        needed = max(0, int(ROOM * shape.kept) + returned - there) + states + GIB
        if free < needed:
            self._refuse(shape, f"it takes {format_bytes(needed)} of its own, and {format_bytes(free)} are free")
            return
        if self._anchor is None:
            self._anchor = torch.zeros((), device=inputs[0].device, requires_grad=True)
        try:
            shape.recording = self._gpu.record(run, inputs, gradients, turns)
        except torch.OutOfMemoryError:
            torch.clear_autocast_cache()  # what was rounded there never was
            self._refuse(shape, "the GPU's memory was full before all of it was recorded")
            return
        except RuntimeError as error:
            raise _broken(error) from error
        self._made += 1
        turns.size += max(0, free - self._gpu.free())
        self._turns = turns
        shape.tensors = [*denoiser.parameters(), *denoiser.buffers()]
        shape.places = _places(shape.tensors)
        took = format_duration(time.perf_counter() - began)
        if "on" not in self._said:
            self._said.add("on")
            self._say(f"CUDA graph: on, recorded in {took}: the GPU waited for Python to launch its kernels")

    def _refuse(self, shape: _Shape, why: str) -> None:
        shape.refused = True
        if why not in self._said:
            self._said.add(why)
            self._say(f"CUDA graph: off for latents {[*shape.latents]}: {why}")

    def _turn_off(self, why: str) -> None:
        """For all shapes and the whole run."""
        self._off = True
        self.release()
        self._say(f"CUDA graph: off, kernels are launched one by one: {why}")


def _places(tensors: Sequence[Tensor]) -> list[int]:
    return [one.data_ptr() for one in tensors]


def _broken(error: BaseException) -> MachineError:
    """Of a recording that was begun and could not be ended: torch's streams, generators and memory stay as they were in
    the middle of it (so its sources say), and a run that went on would fail somewhere else."""
    first = error
    while first.__context__ is not None:  # the end of a recording fails too, and says less
        first = first.__context__
    found = (str(first).strip() or type(first).__name__).splitlines()[0]
    return MachineError(
        f"a step could not be recorded as a CUDA graph: {found}\nThe same command with --set training.compile=off, "
        "which records nothing, goes on from the last checkpoint; please report this"
    )
