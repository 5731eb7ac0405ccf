"""Token routing as a config requests it, and its routes resolved for a denoiser with a given number of blocks.

The planner and the run use the same function, which is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import Field, Strict

from gracetune.config.base import Section
from gracetune.errors import ConfigError, Problem

KEY = "training.token_routing.routes"
BlockNumber = Annotated[int, Strict(), Field(ge=-1000, le=1000)]


class TokenRoute(Section):
    """One route, as configured. `resolve_routes` turns it into a `Route`."""

    skip_ratio: Annotated[float, Strict(), Field(ge=0, lt=1)]
    """Share of the image's tokens that skip the blocks; they reach the block after `last_block` unchanged. They are
    chosen at random for each sample and step."""
    first_block: BlockNumber
    """Counted from 0; negative numbers count from the end, -1 is the last block. FLUX.1's single-stream blocks are
    numbered after its double-stream blocks."""
    last_block: BlockNumber
    """Inclusive."""


class TokenRouting(Section):
    """TREAD: some of an image's tokens skip some blocks during training. Samples are generated with all tokens."""

    routes: tuple[TokenRoute, ...] = ()
    """In the order of the blocks, without overlaps."""


@dataclass(frozen=True)
class Route:
    """A route through a denoiser whose number of blocks is known."""

    first: int
    last: int
    """Inclusive."""
    skip_ratio: float

    def kept(self, tokens: int) -> int:
        """Return how many of a sample's tokens pass through the blocks: at least one, rounded as in SimpleTuner."""
        return max(1, tokens - round(tokens * self.skip_ratio))


def resolve_routes(routes: Sequence[TokenRoute], blocks: int) -> tuple[Route, ...]:
    """Resolve block numbers for a denoiser with `blocks` blocks, and drop routes that skip no tokens.

    Raises ConfigError for blocks that the denoiser does not have, and for routes that overlap or are out of order.
    """
    problems = [*_outside(routes, blocks)]
    if not problems:
        problems = [*_out_of_order(routes, blocks)]
    if problems:
        raise ConfigError(problems)
    return tuple(
        Route(_position(route.first_block, blocks), _position(route.last_block, blocks), route.skip_ratio)
        for route in routes
        if route.skip_ratio > 0
    )


def _position(number: int, blocks: int) -> int:
    return number if number >= 0 else blocks + number


def _outside(routes: Sequence[TokenRoute], blocks: int) -> Iterator[Problem]:
    for number, route in enumerate(routes):
        for name, block in (("first_block", route.first_block), ("last_block", route.last_block)):
            if not 0 <= _position(block, blocks) < blocks:
                expected = f"one of the model's {blocks} blocks: 0 to {blocks - 1}, or {-blocks} to -1"
                near = max(-blocks, block) if block < 0 else blocks - 1
                key = f"{KEY}[{number}].{name}"
                yield Problem(key, str(block), expected, f"--set '{key}={near}'")


def _out_of_order(routes: Sequence[TokenRoute], blocks: int) -> Iterator[Problem]:
    spans = [tuple(_position(block, blocks) for block in (one.first_block, one.last_block)) for one in routes]
    for number, ((first, last), route) in enumerate(zip(spans, routes, strict=True)):
        if first > last:
            yield Problem(
                f"{KEY}[{number}]", f"from {route.first_block} to {route.last_block}: blocks {first} to {last}",
                "a first block that is not after the last one", "swap the two",
            )  # fmt: skip
    for number, ((_, before), (first, last)) in enumerate(pairwise(spans), start=1):
        if before >= first and first <= last:
            yield Problem(
                f"{KEY}[{number}]", f"blocks {first} to {last}, after a route that ends at block {before}",
                "routes in the order of their blocks, without overlaps: SimpleTuner never starts such a route",
                f"begin it at block {before + 1} or later, or remove it",
            )  # fmt: skip
