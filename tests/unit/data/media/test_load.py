"""Loading a reference gives a sample, and the same reference always the same sample."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gracetune.data.errors import DataError, MissingFileError, UnreadableMediaError
from gracetune.data.media import kind_of
from gracetune.data.media.augment import read_transforms
from gracetune.data.media.load import DecodeLimits, load
from gracetune.data.refs import AppliedAugmentation, Bucket, Canny, CaptionRef, Clip, Fit, MaskRef, SampleRef
from unit.data.media.generated import (
    DictBackend,
    audio_bytes,
    every,
    generated_image,
    image_bytes,
    number_of,
    tone,
    video_bytes,
)

TARGETS = DictBackend({
    "cat.png": image_bytes(generated_image(24, 16)),
    "clear.png": image_bytes(Image.merge("RGBA", (*generated_image(24, 16).split(), Image.new("L", (24, 16), 51)))),
    "clip.mp4": video_bytes(every(0.04, 20)),
    "song.wav": audio_bytes(np.stack([tone(300, 1, 8000), tone(400, 1, 8000)]), 8000, subtype="FLOAT"),
})  # fmt: skip
SOURCES = DictBackend(
    {"cat.png": image_bytes(generated_image(24, 16, 40)), "wide.png": image_bytes(generated_image(40, 20))}
)
MASKS = DictBackend(
    {"cat.png": image_bytes(Image.fromarray(np.repeat(np.arange(24, dtype=np.uint8)[None] * 10, 16, 0)))}
)
BACKENDS = {"targets": TARGETS, "sources": SOURCES, "masks": MASKS}

IMAGE = SampleRef("targets", "cat.png", "d1", Bucket(16, 16), Fit((24, 16), (24, 16), 4, 0), CaptionRef("a cat"))
VIDEO = SampleRef(
    "targets", "clip.mp4", "d2", Bucket(32, 24, 5), Fit((64, 48), (32, 24)), CaptionRef("a clip"), Clip(0.2, 0.2)
)
AUDIO = SampleRef(
    "targets",
    "song.wav",
    "d3",
    Bucket(audio_samples=4000, audio_channels=2),
    None,
    CaptionRef("a song"),
    Clip(0.25, 0.5, sample_rate=8000),
)
MASK = MaskRef("masks", "cat.png", "d4")


def backend_of(dataset: str) -> DictBackend:
    return BACKENDS[dataset]


def test_an_image() -> None:
    sample = load(IMAGE, backend_of)
    assert sample.pixels is not None
    assert (sample.pixels.shape, sample.pixels.dtype) == ((3, 16, 16), torch.float32)
    expected = torch.from_numpy(np.asarray(generated_image(24, 16))[:, 4:20].copy()).permute(2, 0, 1) / 127.5 - 1
    assert torch.allclose(sample.pixels, expected)
    assert sample.pixels.is_contiguous()
    assert (sample.audio, sample.mask, sample.conditioning) == (None, None, ())
    assert sample.ref is IMAGE


def test_black_and_white_are_the_ends_of_the_range() -> None:
    chequers = Image.fromarray(np.array([[0, 255]], np.uint8)).convert("RGB")
    backend = DictBackend({"a": image_bytes(chequers)})
    ref = replace(IMAGE, path="a", bucket=Bucket(2, 1), fit=Fit((2, 1), (2, 1)))
    pixels = load(ref, lambda _: backend).pixels
    assert pixels is not None
    assert pixels[0].tolist() == [[-1.0, 1.0]]


def test_a_video() -> None:
    sample = load(VIDEO, backend_of)
    assert sample.pixels is not None
    assert (sample.pixels.shape, sample.pixels.dtype) == ((3, 5, 24, 32), torch.float32)
    frames = sample.pixels.permute(1, 2, 3, 0).numpy()
    assert [number_of(frame) for frame in frames] == [5, 6, 7, 8, 9]
    assert sample.pixels.min() >= -1
    assert sample.pixels.max() <= 1


def test_one_frame_of_a_video_is_still_a_video() -> None:
    pixels = load(replace(VIDEO, bucket=Bucket(32, 24, 1)), backend_of).pixels
    assert pixels is not None
    assert pixels.shape == (3, 1, 24, 32)


def test_audio() -> None:
    sample = load(AUDIO, backend_of)
    assert sample.audio is not None
    assert (sample.audio.shape, sample.audio.dtype) == ((2, 4000), torch.float32)
    expected = np.stack([tone(300, 1, 8000), tone(400, 1, 8000)])[:, 2000:6000]
    assert np.allclose(sample.audio.numpy(), expected, atol=1e-6)
    assert sample.pixels is None


def test_a_mask_is_cut_and_flipped_with_its_image() -> None:
    levels = np.repeat(np.arange(24)[None] * 10 / 255, 16, 0)[:, 4:20]
    for flip in (False, True):
        sample = load(replace(IMAGE, mask=MASK, augmentation=AppliedAugmentation(flip_x=flip)), backend_of)
        assert sample.mask is not None
        assert (sample.mask.shape, sample.mask.dtype) == ((1, 16, 16), torch.float32)
        assert np.allclose(sample.mask[0].numpy(), levels[:, ::-1] if flip else levels, atol=1e-6)


def test_edges_are_found_before_the_image_is_scaled() -> None:
    scaled = replace(IMAGE, path="black and white", bucket=Bucket(12, 8), fit=Fit((24, 16), (12, 8)))
    halves = np.zeros((16, 24, 3), np.uint8)
    halves[:, 12:] = 255
    backend = DictBackend({"black and white": image_bytes(Image.fromarray(halves))})
    pixels = load(replace(scaled, canny=Canny(50, 100)), lambda _: backend).pixels
    assert pixels is not None
    edges = np.zeros((16, 24), np.uint8)
    edges[1:-1, 11:13] = 255  # both pixels at the step have the same strength
    expected = Image.fromarray(edges).resize((12, 8), Image.Resampling.LANCZOS)
    assert torch.allclose(pixels, torch.from_numpy(np.asarray(expected) / np.float32(127.5) - 1).expand(3, -1, -1))


def test_weights_lie_between_the_least_and_one() -> None:
    plain = load(replace(IMAGE, mask=MASK), backend_of).mask
    lifted = load(replace(IMAGE, mask=replace(MASK, min_weight=0.25)), backend_of).mask
    inverted = load(replace(IMAGE, mask=replace(MASK, min_weight=0.25, invert=True)), backend_of).mask
    assert plain is not None
    assert lifted is not None
    assert inverted is not None
    assert torch.allclose(lifted, 0.25 + 0.75 * plain)
    assert torch.allclose(inverted, 0.25 + 0.75 * (1 - plain))


def test_alpha_as_the_mask_leaves_the_colours_alone() -> None:
    clear = replace(IMAGE, path="clear.png")
    masked = load(replace(clear, mask=MaskRef("targets", "clear.png", "d1", from_alpha=True)), backend_of)
    assert masked.mask is not None
    assert masked.pixels is not None
    assert torch.allclose(masked.mask, torch.full((1, 16, 16), 0.2))
    plain, on_white = load(IMAGE, backend_of).pixels, load(clear, backend_of).pixels
    assert plain is not None
    assert on_white is not None
    assert torch.equal(masked.pixels, plain)
    assert on_white.mean() > plain.mean()


def test_a_mask_of_another_size_fits_and_of_another_shape_does_not() -> None:
    small = DictBackend({"a": image_bytes(Image.new("L", (12, 8), 255)), "b": image_bytes(Image.new("L", (16, 16)))})
    sample = load(replace(IMAGE, mask=MaskRef("m", "a", "d")), lambda name: small if name == "m" else TARGETS)
    assert sample.mask is not None
    assert torch.equal(sample.mask, torch.ones(1, 16, 16))
    with pytest.raises(UnreadableMediaError, match=r"^dataset m: b: a mask of 16x16 for an image of 24x16; use"):
        load(replace(IMAGE, mask=MaskRef("m", "b", "d")), lambda name: small if name == "m" else TARGETS)


def test_scaling_a_mask_antialiases_and_does_not_ring() -> None:
    stripes = np.tile(np.array([0, 255], np.uint8), (32, 24))
    edge = np.full((4, 6), 64, np.uint8)
    edge[:, 3:] = 192
    backend = DictBackend(
        {"stripes": image_bytes(Image.fromarray(stripes)), "edge": image_bytes(Image.fromarray(edge))}
    )
    for path, low, high in (("stripes", 0.45, 0.55), ("edge", 64 / 255, 192 / 255)):
        ref = replace(IMAGE, mask=MaskRef("m", path, "d"))
        mask = load(ref, lambda name: backend if name == "m" else TARGETS).mask
        assert mask is not None
        assert mask.min() >= low
        assert mask.max() <= high


def test_many_threads_decode_the_same() -> None:
    refs = [IMAGE, VIDEO, AUDIO, replace(IMAGE, mask=MASK)] * 6
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda ref: load(ref, backend_of), refs))
    for ref, found in zip(refs, together, strict=True):
        alone = load(ref, backend_of)
        for name in ("pixels", "audio", "mask"):
            one, other = vars(found)[name], vars(alone)[name]
            assert (one is None and other is None) or torch.equal(one, other)


def test_white_drawn_on_nothing_is_a_mask_and_so_are_sixteen_bits() -> None:
    generated = Image.new("RGBA", (24, 16), (255, 255, 255, 0))
    generated.paste((255, 255, 255, 255), (0, 0, 12, 16))
    deep = np.full((16, 24), 65535, np.uint16)
    deep[:, :12] = 32768
    backend = DictBackend({"drawn": image_bytes(generated), "deep": image_bytes(Image.fromarray(deep))})
    ref = replace(IMAGE, bucket=Bucket(24, 16), fit=Fit((24, 16), (24, 16)))
    for path, left, right in (("drawn", 1.0, 0.0), ("deep", 0.5, 1.0)):
        mask = load(replace(ref, mask=MaskRef("m", path, "d")), lambda name: backend if name == "m" else TARGETS).mask
        assert mask is not None
        assert mask[0, :, :12].mean().item() == pytest.approx(left, abs=0.01)
        assert mask[0, :, 12:].mean().item() == pytest.approx(right, abs=0.01)


def test_references_come_in_their_order() -> None:
    first = replace(IMAGE, dataset="sources")
    second = replace(IMAGE, dataset="sources", path="wide.png", bucket=Bucket(20, 10), fit=Fit((40, 20), (20, 10)))
    sample = load(replace(IMAGE, conditioning=(first, second)), backend_of)
    shapes = [other.pixels.shape for other in sample.conditioning if other.pixels is not None]
    assert shapes == [(3, 16, 16), (3, 10, 20)]
    assert [other.ref for other in sample.conditioning] == [first, second]


def test_a_reference_that_names_its_target_is_turned_with_it() -> None:
    transforms = read_transforms([{"method": "RandomRotate90", "p": 1}, {"method": "HorizontalFlip"}], "here")
    same = image_bytes(generated_image(16, 16))
    backend = DictBackend({"target.png": same, "source.png": same})
    ref = replace(IMAGE, path="target.png", fit=Fit((16, 16), (16, 16)))
    for epoch in range(6):
        augmentation = AppliedAugmentation(seed=3, epoch=epoch, transforms=transforms)
        source = replace(ref, path="source.png", digest="d9", augmentation=replace(augmentation, of="d1"))
        sample = load(replace(ref, augmentation=augmentation, conditioning=(source,)), lambda _: backend)
        (other,) = sample.conditioning
        assert sample.pixels is not None
        assert other.pixels is not None
        assert torch.equal(sample.pixels, other.pixels)


@pytest.mark.parametrize("ref", [IMAGE, VIDEO, AUDIO], ids=["image", "video", "audio"])
def test_loading_twice_gives_the_same_sample(ref: SampleRef) -> None:
    augmentation = AppliedAugmentation(seed=1, transforms=read_transforms([{"method": "ColorJitter", "p": 1}], "here"))
    ref = replace(ref, augmentation=augmentation)
    first, second = load(ref, backend_of), load(ref, backend_of)
    for name in ("pixels", "audio"):
        one, other = vars(first)[name], vars(second)[name]
        assert (one is None and other is None) or torch.equal(one, other)


def test_limits_are_applied() -> None:
    for ref in (IMAGE, VIDEO):
        with pytest.raises(UnreadableMediaError, match=f"^dataset {ref.dataset}: {ref.path}: .* megapixels"):
            load(ref, backend_of, DecodeLimits(max_pixels=100))


def test_the_file_that_is_missing_or_bad_is_named() -> None:
    with pytest.raises(MissingFileError, match=r"dog\.png"):
        load(replace(IMAGE, path="dog.png"), backend_of)
    bad = DictBackend({"cat.png": b"no picture"})
    with pytest.raises(UnreadableMediaError) as caught:
        load(
            replace(IMAGE, conditioning=(replace(IMAGE, dataset="bad"),)),
            lambda name: bad if name == "bad" else TARGETS,
        )
    assert (caught.value.path, caught.value.dataset) == ("cat.png", "bad")
    with pytest.raises(DataError, match=r"song\.wav: a reference to audio without a clip"):
        load(replace(AUDIO, clip=None), backend_of)


def test_kinds_by_name() -> None:
    names = {"a.JPG": "image", "b/c.webp": "image", "d.MP4": "video", "e.flac": "audio", "f.txt": None, "g": None}
    assert {name: kind_of(name) for name in names} == names


def test_importing_the_decoders_does_not_import_torch() -> None:
    code = "import sys, gracetune.data.media.load, gracetune.data.captions; sys.exit('torch' in sys.modules)"
    source = Path(__file__).parents[4] / "src"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, check=False).returncode == 0
