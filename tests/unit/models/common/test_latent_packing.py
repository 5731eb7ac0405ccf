from __future__ import annotations

import torch
from diffusers import FluxPipeline
from hypothesis import given
from hypothesis import strategies as st

from gracetune.models.common.latent_packing import pack, references_of, unpack

sides = st.integers(1, 4).map(lambda half: 2 * half)


@given(st.integers(1, 3), st.integers(1, 4), sides, sides)
def test_tokens_equal_diffusers_and_unpack_to_the_latents(batch: int, channels: int, height: int, width: int) -> None:
    latents = torch.arange(float(batch * channels * height * width)).reshape(batch, channels, height, width)
    tokens = pack(latents)
    assert torch.equal(tokens, FluxPipeline._pack_latents(latents, batch, channels, height, width))
    assert torch.equal(unpack(tokens, height, width), latents)


def test_references_keep_their_order() -> None:
    batch = {f"conditioning_latents_{number}": torch.tensor(number) for number in reversed(range(12))}
    assert [int(one) for one in references_of({**batch, "latents": torch.tensor(99)})] == list(range(12))
    assert references_of({"latents": torch.tensor(99)}) == []
