"""A denoiser's forward and backward pass captured as CUDA graphs and replayed, where a step is launch-bound.

    predict = Replay(spec, {denoiser: gradients}, report=view.report)    # called as `models.spec.Predict`
    prediction = predict(denoiser, noisy, level, batch, facts)
    prediction.sum().backward()                                    # adds to the step's gradients

A model of many small kernels keeps a GPU waiting for their launches. A capture is two CUDA graphs, which launch all of
them at once: the same kernels on the same memory, so the same numbers. It serves one denoiser and one shape of all
inputs, and it holds the activations' memory until it is released.

Streams: every pass with gradients runs on one side stream, captured or not, and the parameters' AccumulateGrad nodes
are created on that stream and kept alive. Autograd synchronizes the stream that produced a gradient with the stream of
its AccumulateGrad node; a node left by a pass on the default stream would make the default stream wait for a capture,
which CUDA rejects. Replays run on the caller's stream.

A failed capture leaves torch's caching allocator and random generator in capture mode. `GraphDevice.capture` restores
both, and the run goes on without CUDA graphs.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from gracetune.models.spec import ModelFacts, ModelSpec
from gracetune.train.gradients import FlatGradients
from gracetune.units import GIB, format_bytes, format_duration

PROBES: Final = 2
"""Passes that are checked for being launch-bound. The first pass of a shape compiles and is not counted."""
MOST: Final = 16
"""Captures alive at a time: each has memory of its own in addition to the shared pool."""
ROOM: Final = 1.3
"""A step is given this many times the memory kept for its backward pass, and one GiB."""
STATES: Final = 4
"""The memory of an optimizer (states and working memory), as a multiple of the gradients."""
WORTH: Final = 20
"""Replays that save as much time as a capture takes, roughly."""
_PROBE_S: Final = 1e-3
"""A GPU with less than this left to do when a whole forward pass is launched is launch-bound."""

Key = tuple[object, ...]
Run = Callable[[Sequence[Tensor]], Tensor]


class GraphCaptureError(Exception):
    """A capture failed and torch's state was restored. The message is the first cause, in one line."""


@dataclass(eq=False)
class SharedGraphPool:
    """The memory pool shared by all captures. They can share it because at any time only one of them is between its
    forward and its backward pass."""

    pool: Any
    forwards: int = 0
    """Forward passes replayed so far. The number identifies the pass that owns the pool's activations."""
    size: int = 0
    """Bytes."""


class CapturedPass:
    """A forward and a backward pass as two graphs, with fixed places for their inputs and outputs."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        prediction: Tensor,
        gradient: Tensor,
        graphs: tuple[Any, Any],
        pool: SharedGraphPool,
    ) -> None:
        self._prediction, self._gradient, self._pool = prediction, gradient, pool
        self._inputs, (self._forward, self._backward) = inputs, graphs

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, int]:
        """The prediction, and the number of this forward pass."""
        for buffer, given in zip(self._inputs, inputs, strict=True):
            buffer.copy_(given)
        self._pool.forwards += 1
        self._forward.replay()
        return self._prediction.detach(), self._pool.forwards

    def backward(self, gradient: Tensor, number: int) -> None:
        if number != self._pool.forwards:
            raise RuntimeError("another captured forward pass was replayed before the backward pass of this one")
        self._gradient.copy_(gradient)
        self._backward.replay()


class _ReplayedPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, captured: CapturedPass, inputs: Sequence[Tensor]) -> Tensor:
        """`anchor` requires a gradient, so that autograd calls `backward`; it gets none."""
        prediction, ctx.number = captured.forward(inputs)
        ctx.captured = captured
        return prediction

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.captured.backward(gradient, ctx.number)
        return None, None, None


class GraphDevice:
    """The operations of CUDA's current device that a `Replay` needs."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Work in here runs on the side stream, after the caller's work so far and before what the caller does next.

        Because of that order no tensor needs `record_stream`: memory freed on one of the two streams is used again only
        after the other one is done with it.
        """
        caller = torch.cuda.current_stream()
        self.stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            caller.wait_stream(self.stream)

    def accumulators(self, parameters: Sequence[nn.Parameter]) -> list[Any]:
        """The parameters' AccumulateGrad nodes, created on the side stream. They keep it while they are referenced."""
        with torch.cuda.stream(self.stream):
            return [get_gradient_edge(parameter).node for parameter in parameters]

    def finish(self) -> None:
        torch.cuda.synchronize()

    def is_launch_bound(self) -> bool:
        """Whether the GPU has finished, or nearly finished, what was launched so far."""
        event = torch.cuda.Event()
        event.record()
        time.sleep(_PROBE_S)
        return bool(event.query())

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        """Collects the operations that make this thread wait for the device: a capture can contain none of them."""
        found: list[str] = []
        thread, before = threading.get_ident(), torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            shown = warnings.showwarning

            def show(message: Warning | str, *others: Any, **more: Any) -> None:
                text = str(message)
                if "synchronizing CUDA operation" in text:
                    if threading.get_ident() == thread:
                        found.append(text)
                elif "Synchronization debug mode is a prototype" not in text:  # torch's warning about the watching
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
        """Return the caching allocator's unused blocks to the driver; then the free bytes."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(
        self, run: Run, inputs: Sequence[Tensor], gradients: FlatGradients, shared: SharedGraphPool
    ) -> CapturedPass:
        """Computes nothing: the first replay does. Raises `GraphCaptureError`, or torch's `OutOfMemoryError`."""
        buffers = [one.clone() for one in inputs]
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with self.side_stream():
            with self._capturing(forward, shared.pool):
                prediction = run(buffers)
            gradient = torch.empty_like(prediction)
            # Autocast is for forward passes; autograd never runs a backward pass in it.
            with (
                self._capturing(backward, shared.pool),
                torch.autocast(prediction.device.type, enabled=False),
            ):
                gradients.add(torch.autograd.grad((prediction,), gradients.parameters, (gradient,), allow_unused=True))
        return CapturedPass(buffers, prediction.detach(), gradient, (forward, backward), shared)

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        """As `torch.cuda.graph`, on the current stream, and restores torch's state when the capture fails."""
        invalid: RuntimeError | None = None
        try:
            try:
                # Other threads may go on with their own work: they read ahead.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                yield
            finally:
                invalid = _end_capture(graph, pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise GraphCaptureError(_first_line(error)) from error
        if invalid is not None:
            raise GraphCaptureError(_first_line(invalid)) from invalid


_ABANDONED: Final[list[torch.cuda.CUDAGraph]] = []
"""Graphs whose capture failed. torch's allocator of pinned memory keeps asking them whether a stream is theirs, and
offers no way to end that, so they must outlive it."""


def _end_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> RuntimeError | None:
    """End a capture, valid or not. An error is returned, so that it does not hide the one that invalidated it."""
    try:
        graph.capture_end()
    except RuntimeError as error:
        # torch stops at CUDA's error and leaves out the rest of what `capture_end` does.
        _ABANDONED.append(graph)
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # where `capture_begin` failed before it came to the pool
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        # The generator's state stays in capture mode. A copy has the same seed and offset, and is not in it.
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
        return error
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@dataclass(eq=False)
class _Shape:
    """The state of one denoiser and one shape of its inputs."""

    latents: torch.Size
    passes: int = 0
    """Passes that were launched kernel by kernel, outside `no_capture`."""
    kept: int = 0
    """Bytes a forward pass leaves for the backward pass."""
    rejected: bool = False
    beside: int = -1
    """The size of all captures when there was room beside them."""
    captured: CapturedPass | None = None
    tensors: Sequence[Tensor] = ()
    """The denoiser's parameters and buffers, and their addresses when it was captured:"""
    addresses: Sequence[int] = ()


class Replay:
    def __init__(
        self,
        spec: ModelSpec,
        gradients: Mapping[nn.Module, FlatGradients],
        *,
        report: Callable[[str], None] = lambda text: None,
        gpu: GraphDevice | None = None,
    ) -> None:
        """`gradients` belong to the denoisers that may be captured; any other denoiser is called as usual."""
        assert spec.graph_inputs is not None, "the family has not been captured on a GPU yet"
        self._predict, self._inputs_of, self._gradients = spec.predict, spec.graph_inputs, gradients
        self._emit, self._gpu = report, gpu or GraphDevice()
        self._shapes: dict[Key, _Shape] = {}
        self._shared: SharedGraphPool | None = None
        self._anchor: Tensor | None = None
        self._off = self._is_capture_suspended = False
        self._captures = self._replays = 0
        self._reported: set[str] = set()
        self._accumulators = [self._gpu.accumulators(one.parameters) for one in gradients.values()]

    def __call__(
        self, denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
    ) -> Tensor:
        """See `models.spec.Predict`. With gradients, call the prediction's backward pass before the next call."""
        gradients = self._gradients.get(denoiser)
        if gradients is None or self._off or not torch.is_grad_enabled():
            return self._predict(denoiser, noisy, level, batch, facts)
        needed = self._inputs_of(batch)
        names, inputs = sorted(needed), [noisy, level, *(needed[name] for name in sorted(needed))]

        def run(given: Sequence[Tensor]) -> Tensor:
            return self._predict(denoiser, given[0], given[1], dict(zip(names, given[2:], strict=True)), facts)

        key = (id(denoiser), denoiser.training, *names, *((one.shape, one.dtype, one.device) for one in inputs))
        shape = self._shapes.setdefault(key, _Shape(noisy.shape))
        if shape.captured is not None and shape.addresses != _addresses(shape.tensors):
            self.release()  # a replay would read what is at the old addresses now
        if shape.captured is None and shape.passes > PROBES and not shape.rejected and not self._is_capture_suspended:
            self._capture(shape, run, inputs, denoiser, gradients)
        if shape.captured is not None:
            self._replays += 1
            prediction: Tensor = _ReplayedPass.apply(self._anchor, shape.captured, inputs)  # type: ignore[no-untyped-call]
            return prediction
        return self._launch(shape, run, inputs)

    @property
    def counters(self) -> dict[str, int]:
        return {"cuda_graph.captures": self._captures, "cuda_graph.replays": self._replays}

    @contextmanager
    def no_capture(self) -> Iterator[None]:
        """Inside, existing captures are replayed and other passes are launched, which do not count for whether a shape
        is captured."""
        self._is_capture_suspended = True
        try:
            yield
        finally:
            self._is_capture_suspended = False

    def release(self) -> None:
        """Release the captures' memory, for samples or weights that move. The next steps are captured again."""
        if self._shared is None:
            return
        self._gpu.finish()  # replays that are still queued use that memory
        for shape in self._shapes.values():
            shape.captured, shape.tensors = None, ()
        self._shared = None
        self._gpu.free()

    def _launch(self, shape: _Shape, run: Run, inputs: Sequence[Tensor]) -> Tensor:
        """Launch the pass kernel by kernel, as without captures.

        Passes 2 to 1 + PROBES of a shape are probed: a shape that is not launch-bound is rejected.
        """
        self._make_room(shape)
        # Compiled blocks have guards on the base of a view. Cloning gives them the inputs that a capture will have.
        given = [one.clone() if one._is_view() else one for one in inputs]
        shape.passes += not self._is_capture_suspended
        if self._off:
            return run(given)
        if shape.rejected or shape.passes <= 1 or self._is_capture_suspended:
            with self._gpu.side_stream():
                return run(given)
        self._gpu.finish()  # the work of earlier steps says nothing about this one
        before = self._gpu.held()
        with self._gpu.watched() as waited, self._gpu.side_stream():
            prediction = run(given)
        shape.kept = self._gpu.held() - before
        if waited:
            self._reject(shape, "the model waits for the GPU in its forward pass")
        elif not self._gpu.is_launch_bound():
            self._reject(shape, "the step is GPU-bound")
        return prediction

    def _make_room(self, shape: _Shape) -> None:
        """Release all captures if a pass of this shape, launched kernel by kernel, may not fit beside their memory.

        Use no captures from then on if that would happen again and again.
        """
        if self._shared is None or shape.beside == self._shared.size:
            return
        known = max(self._shapes.values(), key=lambda one: one.kept)
        expected = shape.kept or known.kept * max(1.0, shape.latents.numel() / known.latents.numel())
        if self._gpu.free() >= ROOM * expected + GIB:
            shape.beside = self._shared.size
            return
        self.release()
        if shape.rejected:  # it is never captured, and would evict the others every time
            self._disable("there is no room for it beside samples of other shapes")
        elif self._captures > PROBES and self._replays < WORTH * self._captures:
            self._disable("samples of many shapes take the memory from each other")

    def _capture(
        self, shape: _Shape, run: Run, inputs: Sequence[Tensor], denoiser: nn.Module, gradients: FlatGradients
    ) -> None:
        if sum(one.captured is not None for one in self._shapes.values()) == MOST:
            self._reject(shape, f"{MOST} other shapes are captured")
            return
        began, free = time.perf_counter(), self._gpu.free()
        shared = self._shared or SharedGraphPool(self._gpu.pool())
        gradient_bytes = sum(one.numel() * one.element_size() for one in gradients.parameters)
        # The pool's memory serves this capture too, if a capture that keeps as much is in it already.
        pool_bytes = shared.size if any(one.captured and one.kept >= shape.kept for one in self._shapes.values()) else 0
        states = 0 if shape.addresses else STATES * gradient_bytes  # a shape captured before has its optimizer states
        needed = max(0, int(ROOM * shape.kept) + gradient_bytes - pool_bytes) + states + GIB
        if free < needed:
            self._reject(shape, f"it takes {format_bytes(needed)} of its own, and {format_bytes(free)} are free")
            return
        if self._anchor is None:
            self._anchor = torch.zeros((), device=inputs[0].device, requires_grad=True)
        try:
            shape.captured = self._gpu.capture(run, inputs, gradients, shared)
        except torch.OutOfMemoryError:
            torch.clear_autocast_cache()  # weights cast during the capture were never computed
            self.release()  # the captures before it share the random generator's state, which may have been replaced
            self._reject(shape, "the GPU's memory was full before all of it was captured")
            return
        except GraphCaptureError as error:
            torch.clear_autocast_cache()
            # Graphs captured before share the random generator's state, which was replaced.
            self._disable(f"a capture failed: {error}. Losses are not affected; please report this")
            return
        self._captures += 1
        shared.size += max(0, free - self._gpu.free())
        self._shared = shared
        shape.tensors = [*denoiser.parameters(), *denoiser.buffers()]
        shape.addresses = _addresses(shape.tensors)
        took = format_duration(time.perf_counter() - began)
        self._report("on", f"CUDA graph: on, captured in {took}: the step is launch-bound")

    def _reject(self, shape: _Shape, why: str) -> None:
        shape.rejected = True
        self._report(why, f"CUDA graph: off for latents {[*shape.latents]}: {why}")

    def _report(self, topic: str, line: str) -> None:
        if topic not in self._reported:
            self._reported.add(topic)
            self._emit(line)

    def _disable(self, why: str) -> None:
        """For all shapes and the rest of the run."""
        self._off = True
        self.release()
        self._accumulators.clear()  # from the next pass on everything is on the caller's stream
        self._emit(f"CUDA graph: off, kernels are launched one by one: {why}")


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [one.data_ptr() for one in tensors]
