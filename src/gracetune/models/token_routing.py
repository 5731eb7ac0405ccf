"""Token routing (TREAD): during training, some of an image's tokens bypass some blocks of the denoiser.

    router = TokenRouter(spec, routes, facts, seed)  # routes: config.token_routes.resolve_routes
    install(denoiser, spec.family)
    step = TrainStep(router.spec, ...)               # `predict` routes if the batch says which tokens are kept
    batch = router.routed(batch)

Before a route's first block the kept tokens are selected from the sequence, with their rows of the positions. After its
last block they are put back among the others, which have passed unchanged. Caption tokens are never routed.

Which tokens are kept is a function of (seed, global sample index, route), so it is the same in every process and after
a resume. It is computed once, on the host, and added to the batch as tensors. A forward pass that is recomputed in
the backward pass therefore keeps the same tokens, and a CUDA graph reads the selection from its own inputs: nothing
inside a capture is random or waits for the host. The number of kept tokens depends only on the shape, and a graph is
compiled or captured for it as for any other shape. Loss masks are the one exception: masked tokens are always kept,
their number is read from the device, and such runs are not captured (`train.assembly.why_not_captured`).

Generated samples, held-out losses and the base model's predictions use all tokens: routing applies only to passes with
gradients.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gracetune.cache.collate import LOSS_MASK
from gracetune.config.families import names_of
from gracetune.config.token_routes import Route
from gracetune.models.spec import BlockRouting, ModelFacts, ModelSpec
from gracetune.seeded_random import shuffled

if TYPE_CHECKING:
    from gracetune.cache.batches import Batch

KEPT: Final = "token_routing_{}"
"""Name in a batch: [B, kept], the indices of the tokens that pass through a route's blocks, in ascending order."""
_TOKENS: Final = "hidden_states"
"""diffusers' argument name of the image tokens."""
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Checkpoint = Callable[..., Any]


# -- which tokens are kept ---------------------------------------------------------------------------------------------


class TokenRouter:
    """Chooses the kept tokens of a run's routes, and predicts with them."""

    def __init__(self, spec: ModelSpec, routes: Sequence[Route], facts: ModelFacts, seed: int) -> None:
        assert spec.token_routing is not None, "the config's rules reject other families"
        self._spec, self._routing, self._routes, self._facts, self._seed = spec, spec.token_routing, routes, facts, seed

    @property
    def spec(self) -> ModelSpec:
        """The family's spec, with a `predict` that routes the batches from `routed`."""
        inputs = self._spec.graph_inputs
        return replace(
            self._spec, predict=self._predict,
            graph_inputs=None if inputs is None else lambda batch: {**inputs(batch), **_kept_of(batch)},
        )  # fmt: skip

    def routed(self, batch: Batch) -> Batch:
        """The batch with the kept tokens of each route added."""
        latents = batch.tensors["latents"]
        own = _tokens_of(latents, self._routing.patch)
        total = own + sum(_tokens_of(one, self._routing.patch) for one in self._routing.references(batch.tensors))
        always = np.zeros((len(latents), total), dtype=np.bool_)
        always[:, : self._routing.always(latents, batch.tensors, self._facts)] = True
        masked = np.array([sample.mask is not None for sample in batch.ref.samples])
        if masked.any():
            always[masked, :own] |= masked_tokens(batch.tensors[LOSS_MASK], self._routing.patch)[masked]
        chosen = {}
        for number, route in enumerate(self._routes):
            orders = [shuffled(total, self._seed, "token routing", number, one) for one in batch.ref.indexes]
            kept = kept_tokens(np.stack(orders), route.kept(total), always)
            if kept.shape[1] < total:
                chosen[KEPT.format(number)] = _to_device(kept, latents.device)
        return replace(batch, tensors={**batch.tensors, **chosen})

    def _predict(
        self, denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
    ) -> Tensor:
        """See `models.spec.Predict`."""
        kept_by_route = {route: batch.get(KEPT.format(number)) for number, route in enumerate(self._routes)}
        states = {route: _RouteState(self._routing, kept) for route, kept in kept_by_route.items() if kept is not None}
        if not states or not torch.is_grad_enabled():
            return self._spec.predict(denoiser, noisy, level, batch, facts)
        with _routed_pass(denoiser, self._spec.family, states):
            return self._spec.predict(denoiser, noisy, level, batch, facts)


def kept_tokens(orders: Indices, count: int, always: Mask) -> Indices:
    """[B, kept]: the first `count` tokens of each sample's random order [B, tokens], those in `always` first.

    If a sample has more than `count` in `always`, every sample of the batch keeps as many.
    """
    count = max(count, int(always.sum(axis=1).max()))
    rows = []
    for order, forced in zip(orders, always, strict=True):
        # A stable sort by "not forced" moves forced tokens to the front and keeps the random order of the others.
        first = order[np.argsort(~forced[order], kind="stable")] if forced.any() else order
        rows.append(np.sort(first[:count]))
    return np.stack(rows)


def masked_tokens(mask: Tensor, patch: Sequence[int]) -> Mask:
    """[B, tokens]: whether more than half of a token is inside the loss mask [B, 1, ...]. Synchronizes."""
    pool: Any = F.avg_pool3d if len(patch) == 3 else F.avg_pool2d
    inside: Tensor = pool(mask.float(), tuple(patch)) > 0.5
    return cast(Mask, inside.flatten(1).cpu().numpy())


def _tokens_of(latents: Tensor, patch: Sequence[int]) -> int:
    """Number of tokens of these latents."""
    return math.prod(side // cells for side, cells in zip(latents.shape[2:], patch, strict=True))


def _kept_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name.startswith(KEPT.format(""))}


def _to_device(numbers: Indices, device: torch.device) -> Tensor:
    """Copy to the device. From pinned memory the copy is only queued, so the host does not wait."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


# -- through the blocks ------------------------------------------------------------------------------------------------


def select_tokens(x: Tensor, kept: Tensor) -> Tensor:
    """[B, tokens, ...] -> [B, kept, ...]. `x` may have a batch of 1 that all samples share."""
    numbers = kept.flatten() if len(x) == 1 else _flat(kept, x.shape[1])
    rows: Tensor = x.flatten(0, 1).index_select(0, numbers).unflatten(0, kept.shape)
    return rows


def put_back(x: Tensor, kept: Tensor, rows: Tensor) -> Tensor:
    """A copy of `x` [B, tokens, D] with `rows` [B, kept, D] in place of the kept tokens."""
    flat = x.flatten(0, 1).index_copy(0, _flat(kept, x.shape[1]), rows.flatten(0, 1).to(x.dtype))
    whole: Tensor = flat.unflatten(0, x.shape[:2])
    return whole


def _flat(kept: Tensor, tokens: int) -> Tensor:
    """Token indices [B, kept] as indices into the flattened [B x tokens]."""
    first = torch.arange(len(kept), device=kept.device) * tokens
    return (kept + first[:, None]).flatten()


@dataclass(eq=False)
class _RouteState:
    """The state of one route during one forward pass."""

    routing: BlockRouting
    kept: Tensor
    all_tokens: Tensor | None = None
    """All image tokens, as they entered the route's first block."""
    other_inputs: Mapping[str, Any] = field(default_factory=dict)
    """The blocks' other arguments with one row per token, reduced to the kept rows. Equal for all blocks."""


@dataclass(frozen=True, eq=False)
class RoutedBlock:
    """A block on a route, callable like the block itself."""

    block: nn.Module
    state: _RouteState
    is_first: bool
    is_last: bool

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.run_routed(self.block, inputs, named)

    def run_routed(self, run: Callable[..., Any], inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Select, run the block and put back. `run` is the block or a checkpointed call of it; only `run` is recomputed
        in the backward pass."""
        state = self.state
        names = _argument_names(type(self.block).forward)
        given = {**dict(zip(names, inputs, strict=False)), **named}
        new: dict[str, Any] = {}
        if self.is_first:
            state.all_tokens = given[_TOKENS]
            state.other_inputs = state.routing.select(given, state.kept)
            new[_TOKENS] = select_tokens(state.all_tokens, state.kept)
        new |= state.other_inputs
        output = run(
            *(new.get(name, one) for name, one in zip(names, inputs, strict=False)),
            **{name: new.get(name, one) for name, one in named.items()},
        )
        if not self.is_last:
            return output
        all_tokens, state.all_tokens, state.other_inputs = state.all_tokens, None, {}
        assert all_tokens is not None, "a route's first block runs before its last"
        at = state.routing.output_index
        if at is None:
            return put_back(all_tokens, state.kept, output)
        return tuple(
            put_back(all_tokens, state.kept, one) if number == at else one for number, one in enumerate(output)
        )


@cache
def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


class RoutedBlocks(nn.ModuleList):
    """A denoiser's list of blocks. Iterating over it during a routed pass yields blocks on routes wrapped in
    `RoutedBlock`. Modules, names and weights stay those of the list."""

    states: tuple[Mapping[Route, _RouteState], int] = ({}, 0)
    """The routes of the current pass, and the number of this list's first block among all blocks."""

    def __iter__(self) -> Iterator[Any]:
        states, offset = self.states
        for number, block in enumerate(super().__iter__(), start=offset):
            found = next((route for route in states if route.first <= number <= route.last), None)
            if found is None:
                yield block
            else:
                yield RoutedBlock(block, states[found], number == found.first, number == found.last)


def install(denoiser: nn.Module, family: str) -> None:
    """Prepare the denoiser's lists of blocks for routing. Outside routed passes nothing changes."""
    for blocks in block_lists(denoiser, family):
        blocks.__class__ = RoutedBlocks


def block_lists(denoiser: nn.Module, family: str) -> list[nn.ModuleList]:
    return [cast(nn.ModuleList, denoiser.get_submodule(name)) for name in names_of(family).routed_blocks]


@contextmanager
def _routed_pass(denoiser: nn.Module, family: str, states: Mapping[Route, _RouteState]) -> Iterator[None]:
    lists, offset = block_lists(denoiser, family), 0
    try:
        for blocks in lists:
            assert isinstance(blocks, RoutedBlocks), "call install() first"
            blocks.states = (states, offset)
            offset += len(blocks)
        yield
    finally:
        for blocks in lists:
            vars(blocks).pop("states", None)


def checkpoint_only_blocks(checkpoint: Checkpoint | None) -> Checkpoint:
    """A checkpoint function for diffusers' `enable_gradient_checkpointing` that recomputes only the block itself, not
    the selection of tokens around it. `checkpoint` None uses torch's."""

    def checkpointed(block: Any, *inputs: Any, **named: Any) -> Any:
        if checkpoint is None:
            return torch_checkpoint(block, *inputs, use_reentrant=False, **named)
        return checkpoint(block, *inputs, **named)

    def run(block: Any, *inputs: Any, **named: Any) -> Any:
        if not isinstance(block, RoutedBlock):
            return checkpointed(block, *inputs, **named)
        return block.run_routed(lambda *given, **others: checkpointed(block.block, *given, **others), inputs, named)

    return run
