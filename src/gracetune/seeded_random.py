"""Random values as pure functions of a seed and a purpose. No generator is shared, so the order of calls never matters.

A value does not depend on the rank, the worker or the Python version that computes it, nor on earlier values. Numbers
are bits of a hash. Tensors come from a generator that is seeded for one tensor and then discarded. A CPU and a GPU
produce different tensors for the same seed; two machines of the same kind produce the same.
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
"""2**64 divided by the golden ratio, the increment of SplitMix64."""


def random_bits(seed: int, *parts: Part) -> int:
    """64 random bits that depend on the seed and all parts, in order. The number 1 and the text "1" differ."""
    text = "\x1f".join([f"{type(part).__name__[0]}{part}" for part in (seed, *parts)])
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogateescape"))


def below(limit: int, seed: int, *parts: Part) -> int:
    """A random integer from 0 to limit - 1."""
    if limit < 1:
        raise ValueError(f"limit is {limit}, expected at least 1")
    if limit == 1:
        return 0
    return (random_bits(seed, *parts) * limit) >> 64  # scales the 64 bits to the range without a modulo


def uniform(seed: int, *parts: Part) -> float:
    """A random float in [0, 1)."""
    return (random_bits(seed, *parts) >> 11) * 2.0**-53  # 53 bits, the precision of a float


def shuffled(count: int, seed: int, *parts: Part) -> npt.NDArray[np.int64]:
    """The numbers 0 to count - 1 in random order, sorted by a hash of each. NumPy does this without a Python loop."""
    with np.errstate(over="ignore"):
        names = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return ordered(names, seed, *parts)


def ordered(names: npt.NDArray[np.uint64], seed: int, *parts: Part) -> npt.NDArray[np.int64]:
    """The positions of `names` in random order, where each name is a distinct 64-bit number.

    Removing some names does not change the order of the rest. The hash is the finalizer of SplitMix64.
    """
    with np.errstate(over="ignore"):
        keys = names + np.uint64(random_bits(seed, *parts))
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys ^= keys >> np.uint64(31)
    return np.argsort(keys, kind="stable").astype(np.int64)


# -- tensors: torch is imported only inside these functions -----------------------------------------------------------


def torch_seed(seed: int, *parts: Part) -> int:
    """A seed for a torch generator: 63 bits."""
    return random_bits(seed, *parts) >> 1


def normals(
    shape: Sequence[int], seed: int, purpose: str, indices: Sequence[int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Standard normal values, float32 [len(indices), *shape]. Each row is a function of (seed, purpose, its index)."""
    import torch

    rows = torch.empty((len(indices), *shape), dtype=torch.float32, device=device)
    generator = torch.Generator(device)
    for row, index in zip(rows, indices, strict=True):
        generator.manual_seed(random_bits(seed, purpose, index))
        row.normal_(generator=generator)
    return rows


def normals_for_content(digest: str, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal values on the CPU that depend only on the digest of a file's content."""
    import torch

    seed = hashlib.sha256(digest.encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1)
    return torch.randn(tuple(shape), generator=generator)


@contextmanager
def seeded(seed: int, *names: str) -> Iterator[None]:
    """Seed torch's global CPU generator inside the `with` block and restore its state afterwards.

    For libraries that initialize weights from the global generator. GPU generators are not touched.
    """
    import torch

    digest = hashlib.sha256("\0".join((str(seed), *names)).encode()).digest()
    before = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield
    finally:
        torch.set_rng_state(before)
