"""Chance without a generator: every draw is a pure function of the seed and of what it is for.

So a draw does not depend on which rank, worker or Python version makes it, nor on the draws before it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

Part = str | int

_GOLDEN = 0x9E3779B97F4A7C15


def draw(seed: int, *parts: Part) -> int:
    """64 random bits. Parts are kept apart, and 1 is not "1"."""
    text = "\x1f".join([f"{type(part).__name__[0]}{part}" for part in (seed, *parts)])
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogateescape"))


def below(limit: int, seed: int, *parts: Part) -> int:
    """One of 0 … limit - 1."""
    if limit < 1:
        raise ValueError(f"nothing to choose from: {limit}")
    if limit == 1:
        return 0
    return (draw(seed, *parts) * limit) >> 64


def uniform(seed: int, *parts: Part) -> float:
    """In [0, 1)."""
    return (draw(seed, *parts) >> 11) * 2.0**-53


def shuffled(count: int, seed: int, *parts: Part) -> npt.NDArray[np.int64]:
    """The numbers 0 … count - 1 in random order: sorted by a hash of each, so that it costs no Python loop."""
    with np.errstate(over="ignore"):
        names = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return ordered(names, seed, *parts)


def ordered(names: npt.NDArray[np.uint64], seed: int, *parts: Part) -> npt.NDArray[np.int64]:
    """The positions of some things in random order; each is told from the others by a number of its own.

    Where some are missing, the rest come in the same order as with them.
    """
    with np.errstate(over="ignore"):
        keys = names + np.uint64(draw(seed, *parts))
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys ^= keys >> np.uint64(31)
    return np.argsort(keys, kind="stable").astype(np.int64)
