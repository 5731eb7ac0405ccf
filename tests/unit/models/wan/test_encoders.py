"""The encoders' cache entries, compared with diffusers' own code and the contract of `cache.encoder`."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

from gracetune.cache.encoder import Prompt
from gracetune.data.errors import DataError
from gracetune.errors import ConfigError
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, PartPlacement
from gracetune.models.wan.spec import SPEC
from unit.models.loaded import latent_encoder, text_encoder
from unit.models.wan.cases import (
    BY_VAE,
    CASES,
    CPU,
    Case,
    TinyModel,
    clip,
    entries,
    pipeline_of,
    run,
    source_of,
    texts_of,
)

EXACT = {"rtol": 0.0, "atol": 1e-5}


@pytest.mark.parametrize("case", BY_VAE, ids=str)
def test_latents_decode_to_the_vaes_reconstruction(tiny_model: TinyModel, case: Case) -> None:
    source = source_of(tiny_model, case.flavour)
    sample = clip(case.size, case.frames)
    (batch,) = entries(source, case, sample, "a cat")
    pipeline = pipeline_of(source, case)
    frames = run(
        pipeline,
        case,
        prompt="a cat",
        num_inference_steps=1,
        guidance_scale=1.0,
        output_type="pt",
        callback_on_step_end=lambda *_: {"latents": batch["latents"]},
    )
    vae = AutoencoderKLWan.from_pretrained(str(source.folder), subfolder="vae")
    assert sample.pixels is not None
    with torch.no_grad():
        direct = vae.decode(vae.encode(sample.pixels[None]).latent_dist.mode()).sample[0]
    torch.testing.assert_close(frames[0].movedim(0, 1), direct / 2 + 0.5, **EXACT)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_entry_does_not_depend_on_its_batch(tiny_model: TinyModel, case: Case) -> None:
    encoder = latent_encoder("wan", tiny_model("wan", case.flavour), case.options)
    samples = [
        clip(case.size, case.frames, seed=1, mask=torch.rand(1, *reversed(case.size))),
        clip(case.size, case.frames, seed=2),
    ]
    together = encoder.encode(samples)
    for sample, entry in zip(samples, together, strict=True):
        (alone,) = encoder.encode([sample])
        for name, part in alone.items():
            torch.testing.assert_close(entry[name], part, **EXACT)
        assert entry.keys() == alone.keys()
        assert ("loss_mask" in entry) == (
            sample.mask is not None or (case.flavour.startswith("ti2v") and case.from_image)
        )
    assert encoder.encode([]) == []


def test_images_and_clips_of_one_frame_are_the_same(tiny_model: TinyModel) -> None:
    encoder = latent_encoder("wan", tiny_model("wan", "t2v-1.3b-2.1"))
    image = clip((48, 48), frames=1)
    assert image.pixels is not None
    one_frame = dataclasses.replace(image, pixels=image.pixels[:, None])
    assert torch.equal(encoder.encode([image])[0]["latents"], encoder.encode([one_frame])[0]["latents"])


def test_a_mask_is_averaged_to_the_latents_and_repeated_over_their_frames(tiny_model: TinyModel) -> None:
    encoder = latent_encoder("wan", tiny_model("wan", "t2v-14b-2.2"))
    mask = torch.zeros(1, 32, 32)
    mask[:, :, :8] = 1.0
    mask[:, :8, 8:12] = 1.0  # half of one cell
    (entry,) = encoder.encode([clip((32, 32), mask=mask)])
    expected = torch.zeros(1, 2, 4, 4)
    expected[..., 0] = 1.0
    expected[..., 0, 1] = 0.5
    assert torch.equal(entry["loss_mask"], expected)
    assert "loss_mask" not in encoder.encode([clip((32, 32))])[0]


def test_the_5b_has_no_loss_on_the_given_frame(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model, "ti2v-5b-2.2")
    encoder = SPEC.load_latent_encoder(source, CPU, EncodeOptions(image_to_video=True))
    (entry,) = encoder.encode([clip((64, 64))])
    assert entry["loss_mask"].shape == (1, 2, 4, 4)
    assert entry["loss_mask"][:, 0].sum() == 0
    assert bool((entry["loss_mask"][:, 1:] == 1).all())
    torch.testing.assert_close(entry["condition"], entry["latents"][:, :1], **EXACT)
    (image,) = encoder.encode([clip((64, 64), frames=1)])
    assert set(image) == {"latents"}, "nothing follows the first frame of a picture"


def test_text_to_video_weights_reject_image_to_video(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match=r"video.image_to_video.*\n.*true\n.*t2v-14b-2.2 has no image-to-video mode"):
        SPEC.load_latent_encoder(source_of(tiny_model, "t2v-14b-2.2"), CPU, EncodeOptions(image_to_video=True))


def test_posterior_sample_depends_on_content_only(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model, "t2v-14b-2.2")
    mean = SPEC.load_latent_encoder(source, CPU, EncodeOptions())
    drawing = SPEC.load_latent_encoder(source, CPU, EncodeOptions(posterior="sample"))
    one, other = clip((32, 32), seed=1), clip((32, 32), seed=2)
    alone = drawing.encode([one])[0]["latents"]
    assert torch.equal(alone, drawing.encode([one])[0]["latents"])
    torch.testing.assert_close(alone, drawing.encode([other, one])[1]["latents"], **EXACT)
    renamed = dataclasses.replace(one, ref=dataclasses.replace(one.ref, digest="another"))
    assert not torch.equal(alone, drawing.encode([renamed])[0]["latents"])
    assert not torch.equal(alone, mean.encode([one])[0]["latents"])
    assert mean.id != drawing.id


def test_audio_is_rejected_by_name(tiny_model: TinyModel) -> None:
    encoder = latent_encoder("wan", tiny_model("wan", "t2v-14b-2.2"))
    with pytest.raises(DataError, match=r"0\.mp4: found audio, but Wan trains on images"):
        encoder.encode([dataclasses.replace(clip((32, 32)), pixels=None, audio=torch.zeros(2, 2048))])


def test_save_memory_enables_slicing_then_tiling_which_changes_the_id(tiny_model: TinyModel) -> None:
    encoder = SPEC.load_latent_encoder(source_of(tiny_model, "t2v-14b-2.2"), CPU, EncodeOptions())
    samples = [clip((288, 16), frames=1, seed=1), clip((288, 16), frames=1, seed=2)]  # tiles are 256 wide
    whole, before = [entry["latents"] for entry in encoder.encode(samples)], encoder.id
    assert encoder.save_memory()
    assert encoder.id == before
    for entry, expected in zip(encoder.encode(samples), whole, strict=True):
        torch.testing.assert_close(entry["latents"], expected, **EXACT)
    assert encoder.save_memory()
    assert encoder.id != before
    tiled = encoder.encode(samples)[0]["latents"]
    assert tiled.shape == whole[0].shape
    assert not torch.equal(tiled, whole[0])
    assert not encoder.save_memory()
    options = EncodeOptions(tiling=True, slicing=True)
    assert SPEC.load_latent_encoder(source_of(tiny_model, "t2v-14b-2.2"), CPU, options).id == encoder.id


def test_the_entries_are_in_the_placements_dtype_and_the_vae_is_not(tiny_model: TinyModel) -> None:
    source, half = source_of(tiny_model, "i2v-14b-480p-2.1"), PartPlacement(torch.device("cpu"), torch.bfloat16)
    (precise,) = SPEC.load_latent_encoder(source, CPU, EncodeOptions()).encode([clip((32, 32))])
    encoder = SPEC.load_latent_encoder(source, half, EncodeOptions())
    (entry,) = encoder.encode([clip((32, 32))])
    assert {part.dtype for part in entry.values()} == {torch.bfloat16}
    assert torch.equal(entry["latents"], precise["latents"].bfloat16())
    assert torch.equal(entry["condition"], precise["condition"].bfloat16())
    assert encoder.id != SPEC.load_latent_encoder(source, CPU, EncodeOptions()).id


def test_another_vae_is_another_encoder(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = source_of(tiny_model, "t2v-14b-2.2")
    copy = tmp_path / "somewhere" / "vae"
    shutil.copytree(source.folder / "vae", copy)
    moved = dataclasses.replace(source, vae=copy)
    own = SPEC.load_latent_encoder(source, CPU, EncodeOptions()).id
    assert SPEC.load_latent_encoder(moved, CPU, EncodeOptions()).id == own
    vae = AutoencoderKLWan.from_pretrained(str(copy))
    with torch.no_grad():
        vae.quant_conv.weight.add_(0.1)
    vae.save_pretrained(str(copy))
    assert SPEC.load_latent_encoder(moved, CPU, EncodeOptions()).id != own


@pytest.mark.parametrize("flavour", ["t2v-14b-2.2", "i2v-14b-480p-2.1"])
def test_captions_equal_the_pipelines_without_padding(tiny_model: TinyModel, flavour: str) -> None:
    source = source_of(tiny_model, flavour)
    captions = ["a red cat &amp; a   dog ", "", "日本 👀 " * 3, "cat " * 1000]
    encoder = text_encoder("wan", source.folder)
    assert not encoder.reads_images
    found = [entry["prompt_embeds"] for entry in encoder.encode([Prompt(caption) for caption in captions])]
    pipeline = texts_of(pipeline_of(source, Case(flavour)))
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=512)
    for own, padded in zip(found, expected, strict=True):
        torch.testing.assert_close(own, padded[: len(own)], **EXACT)
        assert not padded[len(own) :].any()
        assert bool(own.any(dim=1).all())
    assert [len(own) for own in found][1::2] == [1, 512]
    assert torch.equal(encoder.encode([Prompt(captions[0])])[0]["prompt_embeds"], found[0])


def test_close_frees_the_memory(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model, "i2v-14b-480p-2.1")
    latents, text = SPEC.load_latent_encoder(source, CPU, EncodeOptions()), SPEC.load_text_encoder(source, CPU)
    parts = {**vars(latents), **vars(vars(latents)["_first_frame_encoder"]), **vars(text)}
    modules = [part for part in parts.values() if isinstance(part, torch.nn.Module)]
    assert sorted(type(module).__name__ for module in modules) == [
        "AutoencoderKLWan",
        "CLIPVisionModel",
        "UMT5EncoderModel",
    ]
    latents.close()
    text.close()
    assert all(parameter.is_meta for module in modules for parameter in module.parameters())


def test_the_tokenizer_is_part_of_the_identity(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = source_of(tiny_model, "t2v-14b-2.2")
    copy = ModelSource("copy", Path(shutil.copytree(source.folder, tmp_path / "copy")))
    own = SPEC.load_text_encoder(source, CPU).id
    assert SPEC.load_text_encoder(copy, CPU).id == own
    (copy.folder / "tokenizer" / "note.json").write_text("{}")
    assert SPEC.load_text_encoder(copy, CPU).id != own
