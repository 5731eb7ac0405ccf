"""Random values as functions of a seed and of what they are for: no generator is shared, so nothing depends on order.

A value does not depend on which rank, worker or Python version asks for it, nor on the values asked for before. Numbers
are bits of a hash; tensors come from a generator that is seeded for one tensor and then forgotten. A CPU and a GPU give
different tensors for one seed; two machines of one kind give the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    import torch

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


# -- tensors: torch is imported when one is asked for -----------------------------------------------------------------


def torch_seed(seed: int, *parts: Part) -> int:
    """For a generator of torch's, which takes 63 bits."""
    return draw(seed, *parts) >> 1


def normals(
    shape: Sequence[int], seed: int, purpose: str, indices: Sequence[int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Standard normal values, float32 [len(indices), *shape]: each row is a function of (seed, purpose, its index)."""
    import torch

    rows = torch.empty((len(indices), *shape), dtype=torch.float32, device=device)
    generator = torch.Generator(device)
    for row, index in zip(rows, indices, strict=True):
        generator.manual_seed(draw(seed, purpose, index))
        row.normal_(generator=generator)
    return rows


def normals_for_content(digest: str, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal values on the CPU that depend on a content's digest alone."""
    import torch

    seed = hashlib.sha256(digest.encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1)
    return torch.randn(tuple(shape), generator=generator)


@contextmanager
def seeded(seed: int, *names: str) -> Iterator[None]:
    """Random values inside depend on the seed and the names alone; the CPU's generator is left as it was.

    For libraries that take their initial weights from the CPU's global generator; those of GPUs are not touched.
    """
    import torch

    digest = hashlib.sha256("\0".join((str(seed), *names)).encode()).digest()
    before = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield
    finally:
        torch.set_rng_state(before)
