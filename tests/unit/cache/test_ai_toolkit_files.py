"""Import of caches that are written here like those of ai-toolkit: same names, metadata and tensors."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from gracetune.cache.ai_toolkit_files import ImportReport, LatentRequest, TextRequest, import_latents, import_text
from gracetune.cache.audit import audit
from gracetune.cache.keys import latent_origin, text_origin
from gracetune.cache.required_entries import RequiredEntry
from gracetune.cache.store import DiskStore
from gracetune.data.refs import AppliedAugmentation, Bucket, Clip, Fit, MaskRef, SampleRef, Transform
from unit.cache.samples import TEXT, VAE, ref

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry


def latents_of(sample: SampleRef) -> Entry:
    """A substitute for an encoder. Its output is a deterministic function of content and shape."""
    generator = torch.Generator().manual_seed(int(sample.digest[-8:], 16))
    shape = (4, sample.bucket.height // 8, sample.bucket.width // 8)
    return {"latents": torch.randn(shape, generator=generator)}


def embedding_of(text: str) -> Entry:
    generator = torch.Generator().manual_seed(len(text))
    return {
        "prompt_embeds": torch.randn(len(text), 16, generator=generator),
        "pooled_prompt_embeds": torch.randn(16, generator=generator),
    }


def info(sample: SampleRef, **changes: object) -> dict[str, object]:
    assert sample.fit is not None
    header: dict[str, object] = {
        "filename": sample.path,
        "scale_to_width": sample.fit.resized[0],
        "scale_to_height": sample.fit.resized[1],
        "crop_x": sample.fit.left,
        "crop_y": sample.fit.top,
        "crop_width": sample.bucket.width,
        "crop_height": sample.bucket.height,
        "latent_space_version": "sdxl",
        "latent_version": 1,
    }
    return {name: value for name, value in {**header, **changes}.items() if value is not None}


def name_of(stem: str, header: dict[str, object]) -> str:
    digest = hashlib.md5(json.dumps(header, sort_keys=True).encode()).digest()
    return f"{stem}_{base64.urlsafe_b64encode(digest).decode().replace('=', '')}.safetensors"


def cache_latents(folder: Path, sample: SampleRef, tensors: Entry | None = None, **changes: object) -> Path:
    image = folder / sample.path
    image.write_bytes(b"picture")
    os.utime(image, (1_000_000, 1_000_000))
    header = info(sample, **changes)
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in header.items()}
    metadata |= {"software": json.dumps({"name": "ai-toolkit"}), "format": "pt"}
    file = folder / "_latent_cache" / name_of(image.stem, header)
    file.parent.mkdir(exist_ok=True)
    latent = latents_of(sample)["latents"]
    noisy = latent + 0.05 * torch.randn(latent.shape, generator=torch.Generator().manual_seed(3))
    save_file(tensors or {"latent": noisy.to(torch.bfloat16)}, file, metadata)
    return file


def run_latents(folder: Path, samples: list[SampleRef], **options: object) -> ImportReport:
    requests = [LatentRequest(latent_origin(one, VAE), one, folder / one.path) for one in samples]
    with DiskStore.open(folder / "cache", writable=True) as store, store.writer() as writer:
        return import_latents(writer, requests, **{"spaces": ["sdxl"], "encode": latents_of, **options})  # type: ignore[arg-type]


def run_text(folder: Path, texts: list[str], **options: object) -> ImportReport:
    requests = [TextRequest(text_origin(text, TEXT), text, folder / f"{at}.png") for at, text in enumerate(texts)]
    with DiskStore.open(folder / "cache", writable=True) as store, store.writer() as writer:
        return import_text(writer, requests, **{"archs": ["flux"], "encode": embedding_of, **options})  # type: ignore[arg-type]


def cache_text(folder: Path, number: int, text: str, tensors: Entry | None = None, **changes: object) -> Path:
    header = {"caption": text, "text_embedding_space_version": "flux", "text_embedding_version": 1, **changes}
    file = folder / "_t_e_cache" / name_of(str(number), header)
    file.parent.mkdir(exist_ok=True)
    ours = embedding_of(text)
    theirs = {"text_embed": ours["prompt_embeds"][None], "pooled_embed": ours["pooled_prompt_embeds"][None]}
    save_file(tensors or {name: tensor.to(torch.bfloat16) for name, tensor in theirs.items()}, file)
    return file


# -- taken over


def test_latents_are_taken_over(tmp_path: Path) -> None:
    samples = [ref(number) for number in range(10)]
    samples[4] = replace(samples[4], bucket=Bucket(32, 48))
    for sample in samples[:9]:
        cache_latents(tmp_path, sample)
    report = run_latents(tmp_path, samples)
    assert (report.imported, report.compared, report.rejected, report.without_file) == (9, 4, (), 1)
    with DiskStore.open(tmp_path / "cache", writable=False) as store:
        for sample in samples[:9]:
            found = store.read(latent_origin(sample, VAE).key)["latents"]
            ours = latents_of(sample)["latents"]
            assert found.dtype == ours.dtype
            assert torch.allclose(found, ours, atol=0.5)
        message = audit(store, [RequiredEntry(latent_origin(sample, VAE), sample.path) for sample in samples])
        assert (message.present.entries, message.imported, message.missing.entries) == (9, 9, 1)


def test_what_an_entry_holds_besides_is_added(tmp_path: Path) -> None:
    cache_latents(tmp_path, ref(1))

    def beside(sample: SampleRef) -> Entry:
        return {"time_ids": torch.arange(6.0)}

    def encode(sample: SampleRef) -> Entry:
        return {**latents_of(sample), **beside(sample)}

    assert run_latents(tmp_path, [ref(1)], encode=encode, beside=beside).imported == 1
    with DiskStore.open(tmp_path / "cache", writable=False) as store:
        assert torch.equal(store.read(latent_origin(ref(1), VAE).key)["time_ids"], torch.arange(6.0))


def test_flips_are_understood(tmp_path: Path) -> None:
    """ai-toolkit flips and then crops; gracetune crops and then flips, so left and right of the crop are swapped."""
    fit = Fit((100, 80), (80, 64), 10, 0)
    flipped = replace(ref(1), fit=fit, augmentation=AppliedAugmentation(flip_x=True))
    cache_latents(tmp_path, flipped, crop_x=80 - 64 - 10, flip_x=True)
    assert run_latents(tmp_path, [flipped]).imported == 1


def test_the_right_one_of_several_files_is_taken(tmp_path: Path) -> None:
    cache_latents(tmp_path, ref(1), latent_space_version="flux1")
    cache_latents(tmp_path, ref(1))
    cache_latents(tmp_path, ref(1), crop_x=3)
    report = run_latents(tmp_path, [ref(1)])
    assert (report.imported, report.rejected) == (1, ())


def test_embeddings_are_taken_over(tmp_path: Path) -> None:
    texts = ["a house", "ein Haus am Fluß", "", "a", "no file"]
    texts[2] = "three"
    for number, text in enumerate(texts[:4]):
        cache_text(tmp_path, number, text)
    report = run_text(tmp_path, texts)
    assert (report.imported, report.rejected, report.without_file) == (4, (), 1)
    with DiskStore.open(tmp_path / "cache", writable=False) as store:
        found = store.read(text_origin("ein Haus am Fluß", TEXT).key)
    ours = embedding_of("ein Haus am Fluß")
    assert found.keys() == ours.keys()
    assert all(torch.allclose(found[name], ours[name], atol=0.05) for name in ours)


# -- rejected


JITTER = AppliedAugmentation(seed=1, transforms=(Transform("ToGray", 0.5),))
SAMPLES: dict[str, tuple[SampleRef, str]] = {
    "clip": (replace(ref(1), clip=Clip(0, 1)), "the sample is a clip"),
    "frames": (replace(ref(1), bucket=Bucket(64, 64, 5)), "the sample is a clip"),
    "mask": (replace(ref(1), mask=MaskRef("m", "m.png", "d")), "the sample has a mask"),
    "references": (replace(ref(1), conditioning=(ref(2),)), "the sample has references"),
    "augmented": (replace(ref(1), augmentation=JITTER), "the sample is augmented"),
    "another cut": (replace(ref(1), fit=Fit((80, 64), (80, 64), 9, 0)), "crop_x is 8, but this configuration needs 9"),
    "another size": (replace(ref(1), fit=Fit((80, 64), (96, 64), 8, 0)), "scale_to_width is 80"),
    "flipped": (replace(ref(1), augmentation=AppliedAugmentation(flip_y=True)), "flip_y is False"),
}


@pytest.mark.parametrize("what", SAMPLES)
def test_a_sample_the_file_does_not_tell_of_is_rejected(tmp_path: Path, what: str) -> None:
    sample, reason = SAMPLES[what]
    file = cache_latents(tmp_path, ref(1))
    report = run_latents(tmp_path, [sample])
    assert report.imported == 0
    assert [one.file for one in report.rejected] == [file]
    assert report.rejected[0].reason.startswith(reason)


HEADERS: dict[str, tuple[dict[str, object], str]] = {
    "another file": ({"filename": "2.png"}, "filename is '2.png', but this configuration needs '1.png'"),
    "no file name": ({"filename": None}, "its metadata lacks filename"),
    "another space": ({"latent_space_version": "flux1"}, "latent_space_version is 'flux1'"),
    "another version": ({"latent_version": 2}, "latent_version is 2"),
    "frames": ({"num_frames": 17}, "its metadata contains num_frames"),
    "flipped": ({"flip_x": True}, "flip_x is True"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_does_not_fit_is_rejected(tmp_path: Path, what: str) -> None:
    changes, reason = HEADERS[what]
    cache_latents(tmp_path, ref(1), **changes)
    report = run_latents(tmp_path, [ref(1)])
    assert report.imported == 0
    assert report.rejected[0].reason.startswith(reason)


def test_a_image_changed_since_is_rejected(tmp_path: Path) -> None:
    cache_latents(tmp_path, ref(1))
    os.utime(tmp_path / "1.png")
    os.utime(next((tmp_path / "_latent_cache").iterdir()), (1_000_000, 1_000_000))
    assert run_latents(tmp_path, [ref(1)]).rejected[0].reason.startswith("the image was modified")


def test_other_tensors_are_rejected(tmp_path: Path) -> None:
    cache_latents(tmp_path, ref(1), {"latent": torch.zeros(4, 8, 8), "audio": torch.zeros(2)})
    assert run_latents(tmp_path, [ref(1)]).rejected[0].reason == "it contains audio, latent instead of `latent` only"


def test_a_damaged_file_is_rejected(tmp_path: Path) -> None:
    file = cache_latents(tmp_path, ref(1))
    file.write_bytes(file.read_bytes()[:-4])
    assert run_latents(tmp_path, [ref(1)]).rejected[0].reason.startswith("it cannot be read: ")


DIFFERENT: dict[str, tuple[Callable[[SampleRef], Entry], str]] = {
    "values": (lambda sample: {"latents": -latents_of(sample)["latents"]}, "latents has a relative error of 2.0"),
    "not numbers": (
        lambda sample: {"latents": latents_of(sample)["latents"] * float("nan")},
        "latents has a relative error of nan",
    ),
    "shape": (
        lambda sample: {"latents": latents_of(sample)["latents"][:, None]},
        "latents has the shape (4, 8, 8), ours",
    ),
    "names": (
        lambda sample: {**latents_of(sample), "time_ids": torch.zeros(6)},
        "it contains latents, our encoder makes latents, time_ids",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_where_our_encoder_makes_something_else_nothing_is_taken(tmp_path: Path, what: str) -> None:
    encode, reason = DIFFERENT[what]
    samples = [ref(number) for number in range(1, 6)]
    for sample in samples:
        cache_latents(tmp_path, sample)
    report = run_latents(tmp_path, samples, encode=encode)
    assert report.imported == 0
    assert len(report.rejected) == 5
    assert reason in report.rejected[0].reason
    with DiskStore.open(tmp_path / "cache", writable=False) as store:
        assert store.keys() == []


def test_a_file_of_another_shape_than_those_compared_is_rejected(tmp_path: Path) -> None:
    for number in (1, 2):
        cache_latents(tmp_path, ref(number))
    odd = cache_latents(tmp_path, ref(3), {"latent": torch.zeros(4, 9, 8)})
    report = run_latents(tmp_path, [ref(1), ref(2), ref(3)], compare=1)
    assert (report.imported, report.compared) == (2, 1)
    assert [one.file for one in report.rejected] == [odd]
    assert "its shapes {'latents': (4, 9, 8)}" in report.rejected[0].reason


TEXTS: dict[str, tuple[Entry | None, dict[str, object], str]] = {
    "another caption": (None, {"caption": "a hut"}, "its name does not match this caption for 'flux'"),
    "a control image": (None, {"control_path": "c.png"}, "its name does not match this caption for 'flux'"),
    "another model": (None, {"text_embedding_space_version": "wan21"}, "its name does not match this caption"),
    "a list": ({"text_embed_0": torch.zeros(1, 3, 4)}, {}, "it contains text_embed_0"),
    "no embedding": ({"pooled_embed": torch.zeros(1, 4)}, {}, "it contains no `text_embed`"),
    "a batch": ({"text_embed": torch.zeros(2, 3, 4)}, {}, "`text_embed` has the shape (2, 3, 4)"),
}


@pytest.mark.parametrize("what", TEXTS)
def test_an_embedding_that_cannot_be_identified_is_rejected(tmp_path: Path, what: str) -> None:
    tensors, changes, reason = TEXTS[what]
    cache_text(tmp_path, 0, "a house", tensors, **changes)
    report = run_text(tmp_path, ["a house"])
    assert report.imported == 0
    assert report.rejected[0].reason.startswith(reason)


def test_embeddings_that_depend_on_images_are_rejected(tmp_path: Path) -> None:
    cache_text(tmp_path, 0, "a house")
    request = TextRequest(text_origin("a house", TEXT, (ref(1),)), "a house", tmp_path / "0.png", reads_images=True)
    with DiskStore.open(tmp_path / "cache", writable=True) as store, store.writer() as writer:
        report = import_text(writer, [request], archs=["flux"], encode=embedding_of)
    assert report.rejected[0].reason.startswith("the embedding depends on the sample's references")


def test_an_embedding_of_another_text_encoder_is_rejected(tmp_path: Path) -> None:
    cache_text(tmp_path, 0, "a house", {"text_embed": torch.ones(1, 7, 16), "pooled_embed": torch.ones(1, 16)})
    assert (
        "was encoded again for comparison: pooled_prompt_embeds has a relative error of"
        in run_text(tmp_path, ["a house"]).rejected[0].reason
    )
