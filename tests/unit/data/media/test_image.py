"""Images of every common kind, and every kind of damage."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps

from gracetune.data.errors import DataError, UnreadableMediaError
from gracetune.data.media.image import decode_alpha, decode_image
from gracetune.data.media.probe import probe_image
from gracetune.data.refs import Bucket, Fit
from unit.data.media.generated import DictBackend, generated_image, image_bytes, png, whole


def decode(data: bytes, **options: Any) -> np.ndarray:
    facts = probe_image(DictBackend({"a": data}), "a")
    image = decode_image(data, "a", *whole(facts.width, facts.height), **options)
    assert image.mode == "RGB"
    return np.asarray(image)


def test_a_png_comes_out_as_it_went_in() -> None:
    image = generated_image()
    assert np.array_equal(decode(image_bytes(image)), np.asarray(image))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    stored = generated_image(24, 16)
    lossless = {"lossless": True} if kind == "WEBP" else {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    data = image_bytes(stored, kind, exif=exif, **lossless)
    # What the orientation means, from the other side: Pillow's own transposition of the image without EXIF.
    tagged = generated_image(24, 16)
    tagged.getexif()[274] = orientation
    expected = np.asarray(ImageOps.exif_transpose(tagged)).astype(int)
    facts = probe_image(DictBackend({"a": data}), "a")
    assert (facts.width, facts.height) == ((16, 24) if orientation >= 5 else (24, 16))
    assert np.abs(decode(data) - expected).max() <= (12 if kind == "JPEG" else 0)


def test_exif_after_the_pixels_of_a_png_is_applied() -> None:
    exif = Image.Exif()
    exif[274] = 6
    data = image_bytes(generated_image(24, 16), exif=exif)
    start = data.index(b"eXIf") - 4
    length = struct.unpack(">I", data[start : start + 4])[0] + 12
    chunk, end = data[start : start + length], data.index(b"IEND") - 4
    moved = data[:start] + data[start + length : end] + chunk + data[end:]
    assert Image.open(io.BytesIO(moved)).info.get("exif") is None, "the chunk is not behind the pixels"
    assert decode(moved).shape == (24, 16, 3)
    assert np.array_equal(decode(moved), decode(data))


def test_broken_exif_is_ignored() -> None:
    data = image_bytes(generated_image(), "JPEG", exif=b"Exif\x00\x00NOT TIFF AT ALL")
    assert decode(data).shape == (16, 24, 3)


def half_transparent() -> Image.Image:
    image = Image.new("RGBA", (8, 4), (200, 40, 10, 255))
    image.paste((0, 0, 0, 0), (0, 0, 4, 4))
    return image


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_transparency_is_white(kind: str) -> None:
    data = image_bytes(half_transparent(), kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    pixels = decode(data)
    assert (pixels[:, :4] == 255).all()
    assert (pixels[:, 4:] == (200, 40, 10)).all()
    assert probe_image(DictBackend({"a": data}), "a").has_alpha


def test_half_transparency_is_mixed_with_white() -> None:
    data = image_bytes(Image.new("RGBA", (2, 2), (0, 100, 200, 128)))
    assert np.abs(decode(data)[0, 0].astype(int) - (127, 177, 227)).max() <= 1


def test_alpha_masks_keep_the_file_s_own_colors() -> None:
    image = half_transparent()
    image.putpixel((0, 0), (1, 2, 3, 0))
    data = image_bytes(image)
    assert tuple(decode(data, own_colours=True)[0, 0]) == (1, 2, 3)
    alpha = np.asarray(decode_alpha(data, "a"))
    assert (alpha[:, :4] == 0).all()
    assert (alpha[:, 4:] == 255).all()


def test_a_image_without_alpha_is_opaque() -> None:
    data = image_bytes(generated_image(), "JPEG")
    assert (np.asarray(decode_alpha(data, "a")) == 255).all()
    assert not probe_image(DictBackend({"a": data}), "a").has_alpha


def test_a_palette_with_a_transparent_entry() -> None:
    image = Image.new("P", (4, 2), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.paste(1, (2, 0, 4, 2))
    pixels = decode(image_bytes(image, transparency=0))
    assert (pixels[:, :2] == 255).all()
    assert (pixels[:, 2:] == (200, 100, 50)).all()


def test_palette_grey_and_black_and_white() -> None:
    colours = generated_image().convert("P", palette=Image.Palette.ADAPTIVE)
    assert np.array_equal(decode(image_bytes(colours)), np.asarray(colours.convert("RGB")))
    grey = generated_image().convert("L")
    assert np.array_equal(decode(image_bytes(grey)), np.asarray(grey.convert("RGB")))
    assert set(np.unique(decode(image_bytes(generated_image().convert("1"))))) == {0, 255}
    grey_alpha = Image.merge("LA", (Image.new("L", (2, 2), 40), Image.new("L", (2, 2), 0)))
    assert (decode(image_bytes(grey_alpha)) == 255).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled_not_clipped(kind: str) -> None:
    levels = np.linspace(0, 65535, 300).reshape(15, 20).astype(np.uint16)
    pixels = decode(image_bytes(Image.fromarray(levels), kind))
    assert np.abs(pixels[..., 0] - levels / 257).max() <= 0.5
    assert (pixels[..., 0] == pixels[..., 1]).all()


def test_sixteen_bit_colour_is_scaled_not_clipped() -> None:
    levels = np.linspace(0, 65535, 8 * 8 * 3).reshape(8, 8, 3).astype(">u2")
    rows = b"".join(b"\x00" + row.tobytes() for row in levels)
    assert np.abs(decode(png(8, 8, 16, 2, rows)) - levels / 257).max() <= 1


def test_floats_from_zero_to_one() -> None:
    levels = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    assert np.abs(decode(image_bytes(Image.fromarray(levels), "TIFF"))[..., 0] - levels * 255).max() <= 0.5


@pytest.mark.parametrize("levels", [np.full((4, 4), 3.5, np.float32), np.full((4, 4), np.nan, np.float32),
                                    np.full((4, 4), 70_000, np.int32), np.full((4, 4), -1, np.int32)])  # fmt: skip
def test_values_of_unknown_meaning_are_rejected(levels: np.ndarray) -> None:
    data = image_bytes(Image.fromarray(levels), "TIFF")
    with pytest.raises(UnreadableMediaError, match=r"^a: .*expected 0 to .*; save it"):
        decode(data)


def test_cmyk() -> None:
    inks = generated_image().convert("CMYK")
    pixels = decode(image_bytes(inks, "JPEG", quality=95, subsampling=0))
    assert np.abs(pixels.astype(int) - np.asarray(inks.convert("RGB"))).mean() < 4
    assert np.array_equal(decode(image_bytes(inks, "TIFF")), np.asarray(inks.convert("RGB")))


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})])
def test_the_first_frame_of_an_animation(kind: str, options: dict[str, Any]) -> None:
    first, second = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))
    data = image_bytes(first, kind, save_all=True, append_images=[second], duration=100, **options)
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert (decode(data) == (255, 0, 0)).all()


def swapped_profile() -> bytes:
    """An sRGB profile with red and green swapped."""
    data = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = data.replace(b"rXYZ", b"tXYZ").replace(b"gXYZ", b"rXYZ").replace(b"tXYZ", b"gXYZ")
    data = data.replace(b"rTRC", b"tTRC").replace(b"gTRC", b"rTRC").replace(b"tTRC", b"gTRC")
    return data.replace("sRGB".encode("utf-16-be"), "test".encode("utf-16-be"))


def test_an_icc_profile_is_applied() -> None:
    red = Image.new("RGB", (4, 4), (250, 20, 30))
    data = image_bytes(red, icc_profile=swapped_profile())
    assert np.abs(decode(data)[0, 0].astype(int) - (20, 250, 30)).max() <= 2
    exif = Image.Exif()
    exif[274] = 6
    sideways = image_bytes(red, icc_profile=swapped_profile(), exif=exif)
    assert np.abs(decode(sideways)[0, 0].astype(int) - (20, 250, 30)).max() <= 2
    clear = Image.new("RGBA", (4, 4), (250, 20, 30, 0))
    assert (decode(image_bytes(clear, icc_profile=swapped_profile())) == 255).all()


def test_a_profile_that_cannot_be_used_is_ignored() -> None:
    image = generated_image()
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for profile in (b"no profile at all", swapped_profile()[:200], srgb):
        assert np.array_equal(decode(image_bytes(image, icc_profile=profile)), np.asarray(image))
    grey = generated_image().convert("L")
    assert np.array_equal(decode(image_bytes(grey, icc_profile=swapped_profile())), np.asarray(grey.convert("RGB")))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_a_truncated_file_is_named(kind: str) -> None:
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 255, (64, 64, 3), np.uint8))
    data = image_bytes(noise, kind)
    fit, bucket = whole(64, 64)
    with pytest.raises(UnreadableMediaError, match=r"^cats/one\.jpg: ") as caught:
        decode_image(data[: len(data) * 2 // 3], "cats/one.jpg", fit, bucket)
    assert caught.value.path == "cats/one.jpg"


def test_a_damaged_avif_is_named() -> None:
    data = image_bytes(generated_image(64, 64), "AVIF")
    pixels = data.index(b"mdat") + 4
    with pytest.raises(UnreadableMediaError, match=r"^a\.avif: the image cannot be decoded"):
        decode_image(data[:pixels] + bytes(len(data) - pixels), "a.avif", *whole(64, 64))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "JPEG2000", "PPM", "TGA", "AVIF"]),
    cut=st.floats(0, 1),
    wounds=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
)
@pytest.mark.filterwarnings("ignore::Warning")
def test_damage_is_either_survived_or_named(kind: str, cut: float, wounds: list[tuple[float, int]]) -> None:
    hurt = bytearray(DAMAGED[kind])
    for place, value in wounds:
        hurt[int(place * len(hurt))] = value
    data = bytes(hurt[: max(1, int(cut * len(hurt)))])
    try:
        facts = probe_image(DictBackend({"a": data}), "a", 10_000)
        image = decode_image(data, "a", *whole(facts.width, facts.height), max_pixels=10_000)
    except (UnreadableMediaError, DataError) as error:
        assert str(error).startswith("a: ")
    else:
        assert image.size == (facts.width, facts.height)


DAMAGED = {
    kind: image_bytes(generated_image(16, 12), kind)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "JPEG2000", "PPM", "TGA", "AVIF")
}


def test_an_empty_file_and_a_text_file() -> None:
    backend = DictBackend({"empty.png": b"", "text.png": b"a caption in the wrong place"})
    for read in (probe_image, lambda backend, path: decode_image(backend.read(path), path, *whole(1, 1))):
        with pytest.raises(UnreadableMediaError, match=r"empty\.png: the file is empty \(0 bytes\)"):
            read(backend, "empty.png")
        with pytest.raises(UnreadableMediaError, match=r"text\.png: not an image of a supported format"):
            read(backend, "text.png")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_hundred_megapixels_are_rejected_before_they_are_decoded() -> None:
    bomb = png(10_000, 10_000, 8, 2, b"")  # nothing in it: decoding it would fail for another reason
    with pytest.raises(UnreadableMediaError, match=r"a\.png: 10000x10000 is 100\.0 megapixels, more than the 89\.5 "):
        decode_image(bomb, "a.png", *whole(10_000, 10_000))
    with pytest.raises(UnreadableMediaError, match="scale it down"):
        probe_image(DictBackend({"a.png": bomb}), "a.png")


def test_pillows_own_limit_becomes_our_error() -> None:
    with pytest.raises(UnreadableMediaError, match=r"^a\.png: more than 179 megapixels; scale it down$"):
        decode_image(png(30_000, 30_000, 8, 2, b""), "a.png", *whole(30_000, 30_000))


def test_the_limit_can_be_set() -> None:
    data = image_bytes(generated_image(20, 10))
    with pytest.raises(UnreadableMediaError, match="20x10"):
        decode_image(data, "a", *whole(20, 10), max_pixels=199)
    assert decode_image(data, "a", *whole(20, 10), max_pixels=200).size == (20, 10)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_result_is_the_cut_out_of_the_scaled_image(data: st.DataObject) -> None:
    side = st.integers(4, 60)
    original = (data.draw(side), data.draw(side))
    resized = (data.draw(side), data.draw(side))
    width, height = data.draw(st.integers(1, resized[0])), data.draw(st.integers(1, resized[1]))
    left, top = data.draw(st.integers(0, resized[0] - width)), data.draw(st.integers(0, resized[1] - height))
    image = generated_image(*original)
    found = decode_image(image_bytes(image), "a", Fit(original, resized, left, top), Bucket(width, height))
    scaled = np.asarray(image.resize(resized, Image.Resampling.LANCZOS))
    assert found.size == (width, height)
    assert np.array_equal(np.asarray(found), scaled[top : top + height, left : left + width])


def test_scaling_down_antialiases() -> None:
    chequers = (np.indices((64, 64)).sum(axis=0) % 2 * 255).astype(np.uint8)
    small = decode_image(image_bytes(Image.fromarray(chequers)), "a", Fit((64, 64), (16, 16)), Bucket(16, 16))
    inner = np.asarray(small)[2:-2, 2:-2]
    assert inner.min() > 120
    assert inner.max() < 135


def test_a_file_that_changed_size_is_rejected() -> None:
    with pytest.raises(DataError, match="a: 24x16 now, 32x16 when the dataset was scanned"):
        decode_image(image_bytes(generated_image(24, 16)), "a", *whole(32, 16))


@pytest.mark.parametrize("fit", [Fit((24, 16), (24, 16), 1, 0), Fit((24, 16), (24, 16), 0, -1)])
def test_a_crop_outside_the_image_is_rejected(fit: Fit) -> None:
    with pytest.raises(DataError, match=r"a: the crop .* extends beyond"):
        decode_image(image_bytes(generated_image(24, 16)), "a", fit, Bucket(24, 16))
