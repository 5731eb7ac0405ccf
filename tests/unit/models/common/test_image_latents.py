"""Behaviour of every image latent encoder, tested on SDXL's and Qwen-Image's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from gracetune.cache.encoder import LatentEncoder
from gracetune.data.errors import DataError
from gracetune.data.media.load import Sample
from gracetune.models.common.image_latents import to_image
from gracetune.models.registry import spec_of
from gracetune.models.spec import EncodeOptions
from unit.models.image_families import CPU, TOLERANCE, image, sample_of, source

Load = Callable[[EncodeOptions], LatentEncoder]


@pytest.fixture(params=[("sdxl", "base-1.0"), ("qwen_image", "edit-2509")], ids=["sdxl", "qwen_image"])
def load(request: pytest.FixtureRequest, tiny_model: Callable[[str, str], Path]) -> Load:
    family, flavour = request.param
    folder = tiny_model(family, flavour)
    return lambda options: spec_of(family).load_latent_encoder(source(folder), CPU, options)


def latents(encoder: LatentEncoder, samples: Sequence[Sample]) -> list[torch.Tensor]:
    return [entry["latents"] for entry in encoder.encode(samples)]


def test_entry_does_not_depend_on_its_batch(load: Load) -> None:
    encoder, samples = load(EncodeOptions(posterior="sample")), [sample_of(image(seed)) for seed in range(3)]
    for together, sample in zip(latents(encoder, samples), samples, strict=True):
        torch.testing.assert_close(together, latents(encoder, [sample])[0], **TOLERANCE)


def test_entry_does_not_keep_the_batch_alive(load: Load) -> None:
    for entry in load(EncodeOptions()).encode([sample_of(image(seed)) for seed in range(3)]):
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in entry.values())


def test_posterior_sample_depends_on_content_only(load: Load) -> None:
    mean, generated = load(EncodeOptions()), load(EncodeOptions(posterior="sample"))
    [one] = latents(generated, [sample_of(image(), digest="a" * 32)])
    assert torch.equal(one, latents(generated, [sample_of(image(), digest="a" * 32)])[0])
    assert not torch.equal(one, latents(generated, [sample_of(image(), digest="b" * 32)])[0])
    assert not torch.equal(one, latents(mean, [sample_of(image(), digest="a" * 32)])[0])


def test_mask_is_resized_to_the_latents(load: Load) -> None:
    mask = torch.zeros(1, 32, 48)
    mask[:, :16, :8] = 1.0
    mask[:, :8, 8:12] = 1.0
    masked, bare = load(EncodeOptions()).encode([sample_of(image(), mask=mask), sample_of(image(1))])
    assert "loss_mask" not in bare
    expected = torch.zeros(1, 4, 6)
    expected[:, :2, 0] = 1.0
    expected[:, 0, 1] = 0.5
    torch.testing.assert_close(masked["loss_mask"], expected)


def test_save_memory_keeps_values_first(load: Load) -> None:
    encoder, samples = load(EncodeOptions()), [sample_of(image(seed, (64, 64))) for seed in range(2)]
    before, identity = latents(encoder, samples), encoder.id
    assert encoder.save_memory()
    assert encoder.id == identity
    torch.testing.assert_close(latents(encoder, samples), before, **TOLERANCE)
    assert encoder.save_memory()
    assert encoder.id != identity
    assert encoder.id == load(EncodeOptions(tiling=True)).id
    assert not encoder.save_memory()
    assert not load(EncodeOptions(tiling=True, slicing=True)).save_memory()


def test_tiling_changes_values(tiny_model: Callable[[str, str], Path]) -> None:
    """So tiling must be part of the id. SDXL's tiles are as large as its VAE's sample_size, 32 in the tiny one."""
    folder, large = tiny_model("sdxl", "base-1.0"), [sample_of(image(0, (96, 96)))]
    whole, tiled = (
        latents(spec_of("sdxl").load_latent_encoder(source(folder), CPU, options), large)[0]
        for options in (EncodeOptions(), EncodeOptions(tiling=True))
    )
    assert whole.shape == tiled.shape
    assert not torch.equal(whole, tiled)


def test_close_frees_the_weights(load: Load) -> None:
    encoder = load(EncodeOptions())
    encoder.close()
    assert all(parameter.is_meta for parameter in encoder._vae.parameters())


def test_nothing_to_encode(load: Load) -> None:
    assert load(EncodeOptions()).encode([]) == []


def test_reference_counts_must_agree_within_a_batch(tiny_model: Callable[[str, str], Path]) -> None:
    encoder = spec_of("qwen_image").load_latent_encoder(
        source(tiny_model("qwen_image", "edit-2509")), CPU, EncodeOptions()
    )
    reference = sample_of(image(1, (32, 64)))
    with pytest.raises(DataError, match="number of references differs"):
        encoder.encode([sample_of(image(), reference), sample_of(image(), reference, reference)])
    [entry] = encoder.encode([sample_of(image(), reference, sample_of(image(2, (64, 64))))])
    shapes = {name: tuple(entry[name].shape) for name in sorted(entry)}
    assert shapes == {
        "conditioning_latents_0": (16, 8, 4),
        "conditioning_latents_1": (16, 8, 8),
        "latents": (16, 4, 6),
    }


def test_to_image_inverts_to_pixels() -> None:
    decoded = image(7)
    assert to_image(sample_of(decoded)).tobytes() == decoded.tobytes()
