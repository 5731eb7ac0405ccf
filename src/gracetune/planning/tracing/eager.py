"""What eager autograd keeps of a block for the backward pass, from the block's own code on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gracetune.planning.tracing.calls import BlockCall, training
from gracetune.planning.tracing.memory import AliveTensors, SavedTensors, saved_tensors
from gracetune.planning.tracing.operators import TracedDevice, operators_of


@dataclass(frozen=True)
class LinearInput:
    """The tensor that a linear layer reads."""

    storage: int
    """Identity of its storage."""
    rows: int
    """Of the whole batch."""
    needs_gradient: bool


@dataclass(frozen=True)
class EagerRun:
    saved: SavedTensors
    """Without parameters and the arguments that all blocks share."""
    inputs: Mapping[str, LinearInput]
    enters: SavedTensors
    """The arguments that need gradients: what the block before it returned."""


def run_eager(block: nn.Module, call: BlockCall, trained: Collection[str] | None, device: TracedDevice) -> EagerRun:
    """A forward pass of a block whose layers `trained` are trained. None: everything is."""
    inputs: dict[str, LinearInput] = {}
    flat, (given, named) = call.arguments("meta")
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    enters = SavedTensors()
    for tensor in tensors:
        if tensor.requires_grad:
            enters.add(tensor)
    shared = [tensor for tensor in tensors if not tensor.requires_grad]
    with ExitStack() as stack:
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                stack.callback(module.register_forward_pre_hook(_reading(name, inputs)).remove)
        stack.enter_context(training(block, trained))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(operators_of(device))
        saved = stack.enter_context(saved_tensors([*block.parameters(), *block.buffers(), *shared]))
        block(*given, **named)
    return EagerRun(saved, inputs, enters)


def _reading(name: str, inputs: dict[str, LinearInput]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    held = []  # keeps storages alive, so that no address is used twice

    def read(module: nn.Module, given: tuple[Any, ...]) -> None:
        x = given[0]
        held.append(x)
        inputs[name] = LinearInput(x.untyped_storage()._cdata, x.numel() // x.shape[-1], x.requires_grad)

    return read


def backward_peak(block: nn.Module, call: BlockCall, device: TracedDevice) -> int:
    """Bytes alive at the peak of a frozen block's backward pass, besides what is saved for it."""
    flat, (given, named) = call.arguments("meta")
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    alive = AliveTensors([*block.parameters(), *block.buffers(), *tensors])
    with training(block, ()), torch.device("meta"), operators_of(device), alive:
        results = [leaf for leaf in tree_leaves(block(*given, **named)) if isinstance(leaf, Tensor)]
        kept = alive.now
        alive.peak = 0
        gradients = [torch.empty_like(result) for result in results]
        torch.autograd.backward(results, gradients)
    return alive.peak - kept
