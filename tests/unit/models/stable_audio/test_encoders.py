"""The encoders' cache entries, compared with diffusers' own code and the contract of `cache.encoder`."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from diffusers import AutoencoderOobleck
from diffusers.schedulers.scheduling_utils import SchedulerOutput

from gracetune.cache.encoder import Prompt
from gracetune.data.errors import DataError
from gracetune.data.media.load import Sample
from gracetune.models.spec import EncodeOptions, PartPlacement
from gracetune.models.stable_audio.spec import SPEC
from unit.models.loaded import latent_encoder, text_encoder
from unit.models.stable_audio.cases import CPU, HOP, RATE, TinyModel, entries, pipeline_of, sound, source_of

EXACT = {"rtol": 0.0, "atol": 1e-5}


def test_latents_decode_to_the_vaes_reconstruction(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model)
    sample = sound(32)
    (batch,) = entries(source, sample, "a dog")
    pipeline = pipeline_of(source)
    # The pipeline has no callback that could change latents, so its solver returns ours.
    pipeline.scheduler.step = lambda *_, **__: SchedulerOutput(prev_sample=batch["latents"])
    found = pipeline("a dog", num_inference_steps=1, guidance_scale=1.0).audios[0]
    vae = AutoencoderOobleck.from_pretrained(str(source.folder), subfolder="vae")
    assert sample.audio is not None
    with torch.no_grad():
        direct = vae.decode(vae.encode(sample.audio[None]).latent_dist.mode()).sample[0]
    torch.testing.assert_close(found, direct, **EXACT)
    assert float(found.std()) > 0


def test_entry_does_not_depend_on_its_batch(tiny_model: TinyModel) -> None:
    encoder = latent_encoder("stable_audio", source_of(tiny_model).folder)
    samples = [sound(seed=1, start=2.0), sound(seed=2, pad=True, silent=1000)]
    for sample, entry in zip(samples, encoder.encode(samples), strict=True):
        (alone,) = encoder.encode([sample])
        assert set(entry) == set(alone) == {"latents", "seconds", "seconds_embeds"}
        for name, part in alone.items():
            torch.testing.assert_close(entry[name], part, **EXACT)
        assert alone["latents"].shape[1:] == (8,)
    assert encoder.encode([]) == []


@pytest.mark.parametrize(
    ("sample", "seconds"),
    [
        (sound(8), (0.0, 8 * HOP / RATE)),
        (sound(8, start=30.0), (30.0, 30.0 + 8 * HOP / RATE)),
        (sound(8, silent=2000, pad=True), (0.0, (8 * HOP - 2000) / RATE)),
        (sound(8, silent=2000), (0.0, 8 * HOP / RATE)),
        (sound(8, silent=8 * HOP, pad=True), (0.0, 0.0)),
    ],
    ids=["whole", "a piece", "padded", "with a quiet end", "silence"],
)
def test_seconds_are_the_start_and_end_of_the_audio(
    tiny_model: TinyModel, sample: Sample, seconds: tuple[float, float]
) -> None:
    source = source_of(tiny_model)
    (entry,) = latent_encoder("stable_audio", source.folder).encode([sample])
    assert entry["seconds"].tolist() == pytest.approx(seconds)
    with torch.no_grad():
        start, end = pipeline_of(source).encode_duration(*seconds, "cpu", False, 1)
    torch.testing.assert_close(entry["seconds_embeds"], torch.cat([start, end], dim=1)[0], **EXACT)


def test_half_precision_entries_have_exact_seconds(tiny_model: TinyModel) -> None:
    source, half = source_of(tiny_model), PartPlacement(torch.device("cpu"), torch.bfloat16)
    (precise,) = latent_encoder("stable_audio", source.folder).encode([sound(start=30.3)])
    (entry,) = SPEC.load_latent_encoder(source, half, EncodeOptions()).encode([sound(start=30.3)])
    assert entry["latents"].dtype == entry["seconds_embeds"].dtype == torch.bfloat16
    assert torch.equal(entry["seconds_embeds"], precise["seconds_embeds"].bfloat16())
    assert torch.equal(entry["seconds"], precise["seconds"])


def test_posterior_sample_depends_on_content_only(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model)
    mean = latent_encoder("stable_audio", source.folder)
    drawing = SPEC.load_latent_encoder(source, CPU, EncodeOptions(posterior="sample"))
    one, other = sound(seed=1), sound(seed=2)
    alone = drawing.encode([one])[0]["latents"]
    torch.testing.assert_close(alone, drawing.encode([other, one])[1]["latents"], **EXACT)
    assert not torch.equal(alone, mean.encode([one])[0]["latents"])
    assert mean.id != drawing.id


def test_captions_equal_the_pipelines_without_padding(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model)
    captions = ["a dog", "日本 👀", "sound " * 500]
    encoder = text_encoder("stable_audio", source.folder)
    assert not encoder.reads_images
    found = [entry["prompt_embeds"] for entry in encoder.encode([Prompt(caption) for caption in captions])]
    with torch.no_grad():
        expected = pipeline_of(source).encode_prompt(captions, "cpu", False)
    for own, padded in zip(found, expected, strict=True):
        torch.testing.assert_close(own, padded[: len(own)], **EXACT)
        assert not padded[len(own) :].any()
        assert bool(own.any(dim=1).all())
    assert len(found[-1]) == 128
    (empty,) = encoder.encode([Prompt(" ")])
    assert empty["prompt_embeds"].shape == (1, found[0].shape[1])
    assert not empty["prompt_embeds"].any()


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (dataclasses.replace(sound(), audio=None, pixels=torch.zeros(3, 8, 8)), "trains on audio"),
        (dataclasses.replace(sound(), audio=torch.zeros(1, HOP)), r"1 channels .* need 2 channels at 44100 Hz"),
        (dataclasses.replace(sound(), audio=torch.zeros(2, HOP + 1)), "2049 samples .* whole columns of 2048"),
    ],
    ids=["a picture", "mono", "a broken column"],
)
def test_unsupported_samples_are_rejected_by_name(tiny_model: TinyModel, sample: Sample, message: str) -> None:
    encoder = latent_encoder("stable_audio", source_of(tiny_model).folder)
    with pytest.raises(DataError, match=rf"0\.wav: .*{message}"):
        encoder.encode([sample])


def test_save_memory_and_close(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model)
    encoder, text = SPEC.load_latent_encoder(source, CPU, EncodeOptions()), SPEC.load_text_encoder(source, CPU)
    samples = [sound(seed=1), sound(seed=2)]
    whole, before = encoder.encode(samples), encoder.id
    assert encoder.save_memory()
    assert encoder.id == before
    torch.testing.assert_close(encoder.encode(samples)[1]["latents"], whole[1]["latents"], **EXACT)
    assert encoder.save_memory()
    assert encoder.id != before
    assert not encoder.save_memory()
    modules = [part for part in [*vars(encoder).values(), *vars(text).values()] if isinstance(part, torch.nn.Module)]
    assert len(modules) == 4
    encoder.close()
    text.close()
    assert all(parameter.is_meta for module in modules for parameter in module.parameters())
