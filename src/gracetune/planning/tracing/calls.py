"""The repeated blocks of a denoiser, and the arguments that each kind of block is called with."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gracetune.planning.tracing.operators import TracedDevice, operators_of


@dataclass(frozen=True)
class BlockKind:
    """Blocks of one class with weights of the same shapes."""

    name: str
    """The blocks' path with `*` for their numbers."""
    paths: tuple[str, ...]

    @property
    def second(self) -> str:
        """The block that is traced: the second one, because the first may get no gradient."""
        return self.paths[min(1, len(self.paths) - 1)]


@dataclass(frozen=True)
class TensorArgument:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    strides: tuple[int, ...]
    """Of a tensor of its own: a slice of a larger one becomes contiguous."""


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one call, with tensors replaced by their shapes."""

    leaves: tuple[Any, ...]
    spec: Any

    @property
    def gets_gradient(self) -> bool:
        """Whether a gradient reaches what is before the block."""
        return any(isinstance(leaf, TensorArgument) and leaf.requires_grad for leaf in self.leaves)

    def with_gradient(self) -> BlockCall:
        """The same call after a trained layer: its first tensor needs a gradient."""
        place = next(place for place, leaf in enumerate(self.leaves) if isinstance(leaf, TensorArgument))
        leaves = [*self.leaves]
        leaves[place] = replace(leaves[place], requires_grad=True)
        return replace(self, leaves=tuple(leaves))

    def arguments(self, device: str | None = None) -> tuple[list[Any], tuple[Any, dict[str, Any]]]:
        """New tensors for the call: the flat list, and the same as positional and named arguments."""
        flat = [_made(leaf, device) if isinstance(leaf, TensorArgument) else leaf for leaf in self.leaves]
        return flat, tree_unflatten(flat, self.spec)


def _made(argument: TensorArgument, device: str | None) -> Tensor:
    made = torch.empty_strided(argument.shape, argument.strides, dtype=argument.dtype, device=device)
    return made.requires_grad_(argument.requires_grad)


def block_kinds(
    model: nn.Module, classes: Collection[str], inputs: Mapping[str, Any], device: TracedDevice
) -> tuple[BlockKind, ...]:
    """The kinds of blocks whose class names are given, in the model's order.

    Blocks of a U-Net may have weights of the same shapes and see different numbers of tokens, so a forward pass records
    what they are called with.
    """
    shapes: dict[str, tuple[Any, ...]] = {}
    blocks = {path: module for path, module in model.named_modules() if type(module).__name__ in classes}
    with ExitStack() as stack:
        for path, block in blocks.items():
            stack.callback(block.register_forward_pre_hook(_shapes(path, shapes), with_kwargs=True).remove)
        for context in (torch.no_grad(), torch.device("meta"), operators_of(device)):
            stack.enter_context(context)
        model(**inputs, return_dict=False)
    found: dict[tuple[Any, ...], list[str]] = {}
    for path, block in blocks.items():
        weights = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
        found.setdefault((type(block), weights, shapes[path]), []).append(path)
    return tuple(BlockKind(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", paths[0]), tuple(paths)) for paths in found.values())


def _shapes(path: str, shapes: dict[str, tuple[Any, ...]]) -> Callable[..., None]:
    def record(_block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        leaves = tree_flatten((given, named))[0]
        shapes[path] = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor))

    return record


class _AllCalledError(Exception):
    """Ends a forward pass when every kind of block was called."""


def block_calls(
    model: nn.Module, kinds: Collection[BlockKind], trained: Collection[str], inputs: Mapping[str, Any],
    device: TracedDevice,
) -> dict[str, BlockCall]:  # fmt: skip
    """Path of a kind's second block -> its arguments, in a forward pass that trains the layers of these paths."""
    calls: dict[str, BlockCall] = {}
    with ExitStack() as stack:
        for kind in kinds:
            block = model.get_submodule(kind.second)
            hook = block.register_forward_pre_hook(_recording(kind.second, calls, len(kinds)), with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(training(model, trained))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(operators_of(device))
        try:
            model(**inputs, return_dict=False)
        except _AllCalledError:
            return calls
    raise ValueError(f"no call of {', '.join(kind.second for kind in kinds if kind.second not in calls)}")


def _recording(path: str, calls: dict[str, BlockCall], wanted: int) -> Callable[..., None]:
    def record(_block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        flat, spec = tree_flatten((given, named))
        calls[path] = BlockCall(
            tuple(
                TensorArgument(tuple(leaf.shape), leaf.dtype, leaf.requires_grad, torch.empty_like(leaf).stride())
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in flat
            ),
            spec,
        )
        if len(calls) == wanted:
            raise _AllCalledError

    return record


@contextmanager
def training(model: nn.Module, layers: Collection[str] | None) -> Iterator[None]:
    """Within it, the weights of these layers need gradients, and no others. None: all parameters do."""
    model.requires_grad_(layers is None)
    for path in layers or ():
        model.get_parameter(f"{path}.weight").requires_grad_(True)
    try:
        yield
    finally:
        model.requires_grad_(False)
