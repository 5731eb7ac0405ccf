"""Prepare the denoiser's repeated blocks for training: gradient checkpointing, torch.compile, or both.

Blocks of the same class share one compiled graph: the first block compiles it and the others reuse it. `Shapes` says
whether it is compiled for one shape or for any. The activation budget applies to this run's graphs only; torch's global
setting is not changed.
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

from gracetune.kernels import fused_products
from gracetune.models.activation_parking import ActivationParking
from gracetune.models.token_routing import checkpoint_only_blocks

Shapes = Literal["one", "few", "several"]
"""`one`: a graph for exactly the first shape; if another shape comes, torch compiles one for any shape. `few`: a graph
for exactly each shape. `several`: a graph for any shape from the start. (torch always compiles a separate graph for a
batch of one sample.)"""
_DYNAMIC: Final = {"one": None, "few": False, "several": True}
"""The `dynamic` argument of torch.compile."""
GRAPHS: Final = 64
"""Largest number of graphs for one class of blocks; beyond it torch runs the block uncompiled. Training, evaluation and
each state of an adapter (absent, active, scaled) need their own graphs, and torch's default of 8 is soon reached."""
Compile = Callable[[Any, Any], Any]


@dataclass
class CompileStats:
    """Graphs compiled so far, and the backend's time. Tracing, and work deferred to the first backward pass, are not
    included."""

    graphs: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Preparation:
    """What was done to the blocks."""

    blocks: int
    """How many."""
    compiled: bool = False
    recomputes: bool = False
    """Gradient checkpointing: Python runs whole blocks again in the backward pass."""
    stats: CompileStats = field(default_factory=CompileStats)


def prepare_blocks(
    denoiser: Any, names: Collection[str], *, checkpointing: bool, compiled: bool, budget: float | None = None,
    shapes: Shapes = "several", backend: str = "inductor", parking: ActivationParking | None = None,
    routed: bool = False,
) -> Preparation:  # fmt: skip
    """Prepare the blocks in place.

    `names` are the class names of the blocks. `budget` is the share of the activations that compiled blocks may keep.
    `parking` holds the inputs of checkpointed blocks in host memory; without it they stay on the device. `routed` means
    that tokens may skip blocks.
    """
    if checkpointing:
        checkpoint = None if parking is None else parking.checkpoint
        denoiser.enable_gradient_checkpointing(checkpoint_only_blocks(checkpoint) if routed else checkpoint)
    blocks = [module for module in denoiser.modules() if type(module).__name__ in names]
    done = Preparation(len(blocks), compiled, checkpointing)
    if compiled:
        for child in denoiser.children():
            if next(child.parameters(), None) is None:  # a table of position embeddings
                child.register_forward_hook(_without_views)
        compiler = BudgetedBackend(backend, budget, done.stats)
        for block in blocks:
            _compile(block, compiler, shapes)
    return done


def _without_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """The same tensors, cloned if they are views.

    A graph's guards on a view include the shape of its base. A table [1, tokens, ...] that is a view of [1, height,
    width, ...] would need one graph for square images and another for the rest.
    """
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda one: one.clone() if one._is_view() else one, output)


def _compile(block: nn.Module, compiler: BudgetedBackend, shapes: Shapes) -> None:
    # Without this setting a graph with dynamic shapes also takes Python floats as inputs. An epsilon or a dropout
    # probability becomes a CPU tensor that is read in every call, and compiling that takes a C++ compiler and up to a
    # minute. torch has the setting for the whole process only.
    torch._dynamo.config.specialize_float = True
    options: dict[str, Any] = {"backend": compiler, "dynamic": _DYNAMIC[shapes]}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:  # not in the oldest supported torch
        options["recompile_limit"] = GRAPHS
    else:  # there it is a process-wide limit, beyond which blocks silently run uncompiled
        torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    block.compile(**options)


@contextmanager
def list_costly_operations() -> Iterator[None]:
    """Complete the compiler's list of compute-intensive operations while it partitions a graph.

    torch's list lacks cuDNN's attention and our own operations. The partitioner takes an operation that is not listed
    as cheap, so with an activation budget it would recompute exactly these. (Graphs in torch's cache on disk are
    partitioned already.)
    """
    from torch._functorch import partitioners

    original = partitioners.get_default_op_list

    def complete() -> partitioners.OpTypes:
        known = original()
        known.compute_intensive_ops.update(
            [torch.ops.aten._scaled_dot_product_cudnn_attention, *fused_products.OPERATIONS]
        )  # fmt: skip
        return known

    partitioners.get_default_op_list = complete
    try:
        yield
    finally:
        partitioners.get_default_op_list = original


class BudgetedBackend:
    """A torch.compile backend with its own activation budget.

    The budget is set only while a graph is compiled, because that is when the compiler decides which activations to
    keep. Two backends with the same settings are equal, so the second expert reuses the graphs of the first.
    """

    def __init__(self, backend: str, budget: float | None, stats: CompileStats) -> None:
        self._name, self._budget, self._stats = backend, budget, stats
        self._compile: Compile = torch._dynamo.lookup_backend(backend)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BudgetedBackend) and self._settings == other._settings

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
            with torch._functorch.config.patch(activation_memory_budget=self._budget), list_costly_operations():
                return self._compile(graph, inputs)
        finally:
            self._stats.graphs += 1
            self._stats.seconds += time.perf_counter() - began
