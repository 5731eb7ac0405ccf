"""Small, distinct entries and references for the tests of this folder, identified by a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gracetune.cache.encoder import EncoderId
from gracetune.cache.keys import EntryOrigin, Key, latent_origin
from gracetune.data.refs import Bucket, CaptionRef, Fit, SampleRef

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

VAE = EncoderId("latent", "1234abcd", (("dtype", "bf16"), ("posterior", "mean")))
TEXT = EncoderId("text", "9876", (("dtype", "bf16"), ("max_length", "77")))


def ref(number: int, *, path: str | None = None) -> SampleRef:
    return SampleRef(
        dataset="pictures",
        path=path or f"{number}.png",
        digest=f"{number:032x}",
        bucket=Bucket(64, 64),
        fit=Fit((80, 64), (80, 64), 8, 0),
        caption=CaptionRef("a house"),
    )


def origin(number: int) -> EntryOrigin:
    return latent_origin(ref(number), VAE)


def key(number: int) -> Key:
    return origin(number).key


def entry(number: int, *, side: int = 8) -> Entry:
    """An entry whose content is determined by its number."""
    generator = torch.Generator().manual_seed(number)
    return {
        "latents": torch.randn(4, side, side, generator=generator).to(torch.bfloat16),
        "time_ids": torch.tensor([number, 1, 2, 3, 4, 5], dtype=torch.float32),
        "flag": torch.tensor([True, number % 2 == 0, False]),
    }


def is_entry(found: Entry, number: int, *, side: int = 8) -> bool:
    expected = entry(number, side=side)
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )
