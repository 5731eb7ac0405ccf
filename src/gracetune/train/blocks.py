"""The denoiser's repeated blocks made ready for training: repeated in the backward pass, compiled, or both.

All blocks of a kind share one compiled graph: it is made for the first and found again by the others. Whether it is
made for one shape or for any is decided before (`Shapes`); what the compiler may keep of the activations belongs to
this run's graphs alone and is nobody's global setting afterwards.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import nn

from gracetune.kernels import fused_products as onto
from gracetune.models.activation_parking import ActivationParking
from gracetune.models.token_routing import outside_of

Shapes = Literal["one", "few", "several"]
"""`one`: graphs for exactly the shape they meet; should another come all the same, torch makes one for any. `few`: for
exactly each shape they meet. `several`: for any shape from the first; a batch of one sample has a graph of its own, as
torch always makes it."""
_DYNAMIC: Final = {"one": None, "few": False, "several": True}
GRAPHS: Final = 64
"""Of one kind of block: beyond this torch runs it uncompiled. Training, evaluation and each way of taking an adapter
(without, with, at a strength) have their own; torch's limit of 8 is soon reached."""
Compile = Callable[[Any, Any], Any]


@dataclass
class CompileStats:
    """Time is the backend's: what torch needs to trace a block comes on top, and what it defers to the first backward
    pass."""

    graphs: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Preparation:
    """What was done to the blocks."""

    blocks: int
    compiled: bool = False
    repeats: bool = False
    """Blocks are computed again as a whole in the backward pass, called by Python."""
    stats: CompileStats = field(default_factory=CompileStats)


def prepare_blocks(
    denoiser: Any, names: Collection[str], *, checkpointing: bool, compiled: bool, budget: float | None = None,
    shapes: Shapes = "several", backend: str = "inductor", parking: ActivationParking | None = None,
    routed: bool = False,
) -> Preparation:  # fmt: skip
    """`names` are the classes of the blocks; `budget` is the part of the activations that compiled blocks may keep;
    `parking` is where the inputs of checkpointed blocks wait, if not on the device; `routed`: tokens may skip blocks.
    """
    if checkpointing:
        checkpoint = None if parking is None else parking.checkpoint
        denoiser.enable_gradient_checkpointing(outside_of(checkpoint) if routed else checkpoint)
    blocks = [module for module in denoiser.modules() if type(module).__name__ in names]
    done = Preparation(len(blocks), compiled, checkpointing)
    if compiled:
        for child in denoiser.children():
            if next(child.parameters(), None) is None:  # tables of positions
                child.register_forward_hook(_without_views)
        compiler = Budgeted(backend, budget, done.stats)
        for block in blocks:
            _compile(block, compiler, shapes)
    return done


def _without_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """The same tensors with memory of their own. Of a view, graphs also remember the shape of what it is a view of:
    a table [1, tokens, ...] put together by height and width would have a graph for square pictures and one for others.
    """
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda one: one.clone() if one._is_view() else one, output)


def _compile(block: nn.Module, compiler: Budgeted, shapes: Shapes) -> None:
    # A graph for any shape would also be one for any number: an epsilon or a dropout probability becomes a CPU tensor
    # that is read in every call, and compiling it takes a C++ compiler and up to a minute. torch has this setting for
    # the whole process only.
    torch._dynamo.config.specialize_float = True
    options: dict[str, Any] = {"backend": compiler, "dynamic": _DYNAMIC[shapes]}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:  # younger than the oldest torch we run on
        options["recompile_limit"] = GRAPHS
    else:  # one number for the process: blocks beyond it would run uncompiled, and nobody would say so
        torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    block.compile(**options)


@contextmanager
def costly_work_known() -> Iterator[None]:
    """While the compiler decides what to repeat, its list of what takes long has all of it.

    torch's own lacks cuDNN's attention, and cannot have ours. What is not in it counts as free, whatever its
    multiplications: a budget would repeat just that. (Graphs that torch finds in its cache on disk are cut already.)
    """
    from torch._functorch import partitioners

    original = partitioners.get_default_op_list

    def complete() -> partitioners.OpTypes:
        known = original()
        known.compute_intensive_ops.update(
            [torch.ops.aten._scaled_dot_product_cudnn_attention, *onto.OPERATIONS]
        )  # fmt: skip
        return known

    partitioners.get_default_op_list = complete
    try:
        yield
    finally:
        partitioners.get_default_op_list = original


class Budgeted:
    """A backend of torch.compile with an activation budget of its own.

    The budget is in force only while a graph is made: that is when the compiler decides what to keep. Two with the same
    settings are equal, so the second expert finds the graphs of the first.
    """

    def __init__(self, backend: str, budget: float | None, stats: CompileStats) -> None:
        self._name, self._budget, self._stats = backend, budget, stats
        self._compile: Compile = torch._dynamo.lookup_backend(backend)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Budgeted) and self._settings == other._settings

    def __hash__(self) -> int:
        return hash(self._settings)

    @property
    def _settings(self) -> tuple[str, float | None]:
        return self._name, self._budget

    def __call__(self, graph: Any, inputs: Any) -> Any:
        began = time.perf_counter()
        try:
            if self._budget is None:
                return self._compile(graph, inputs)
            with torch._functorch.config.patch(activation_memory_budget=self._budget), costly_work_known():
                return self._compile(graph, inputs)
        finally:
            self._stats.graphs += 1
            self._stats.seconds += time.perf_counter() - began
