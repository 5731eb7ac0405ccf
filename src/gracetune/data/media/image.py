"""Decoding images: any file Pillow reads becomes upright 8-bit sRGB in the exact size of its bucket.

- Transparent areas become white. If the alpha channel is the loss mask, they keep the file's own colors instead: masked
  areas are not trained on, and white would bleed into the edges.
- ICC profiles are applied. Photographs in Display P3 or Adobe RGB would look dull if read as sRGB, CMYK would be wrong,
  and the model would learn that. A profile that cannot be used is ignored, as image viewers do.
- Only the first frame of an animation is used.
- 16-bit images are scaled to 8 bits. Pillow's own conversion of grayscale ones clips them to white.
"""

from __future__ import annotations

import io
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from gracetune.data.backends.stream import stream_over
from gracetune.data.errors import DataError, UnreadableMediaError
from gracetune.data.media.edges import canny_edges
from gracetune.data.refs import Bucket, Canny, Fit

Bytes = bytes | memoryview
MAX_PIXELS = 89_478_485
"""Pillow's limit for its decompression bomb warning: a quarter of a GiB of RGB. Larger files are scans, mistakes or
attacks."""

# The exceptions Pillow's format readers raise for damaged files, as observed with such files.
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error, IndexError, KeyError, TypeError, OverflowError,
           zlib.error, RuntimeError, Image.DecompressionBombError)  # fmt: skip
_ORIENTATION = 274  # the EXIF tag
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transposition that makes an image of each EXIF orientation upright."""


class _NoBombWarnings:
    """Suppresses Pillow's warning about large images. We reject them with an error that names the file instead.

    Warning filters belong to the whole process. The first thread to enter sets the filter, and the last one to leave
    restores the previous state. One `catch_warnings` per thread would restore them in the wrong order.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._changed = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._changed.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._changed.close()


NO_BOMB_WARNINGS = _NoBombWarnings()


def decode_image(
    data: Bytes,
    path: str,
    fit: Fit,
    bucket: Bucket,
    *,
    own_colours: bool = False,
    canny: Canny | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """Decode to RGB in the bucket's size. `own_colours` keeps the colors of transparent areas instead of white. With
    `canny`, the result is the edges of the image, found before it is scaled."""
    image = open_rgb(data, path, own_colours=own_colours, max_pixels=max_pixels)
    return fit_to_bucket(image if canny is None else canny_edges(image, canny), path, fit, bucket)


def open_rgb(data: Bytes, path: str, *, own_colours: bool = False, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode to RGB at the file's own size."""
    with damage_named(path):
        return _rgb(open_upright(data, path, max_pixels), path, own_colours)


def decode_alpha(data: Bytes, path: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The alpha channel at the file's own size; all white if the file has none."""
    with damage_named(path):
        image = open_upright(data, path, max_pixels)
        if not image.has_transparency_data:
            return Image.new("L", image.size, 255)
        return image.convert("RGBA").getchannel("A")


def open_upright(data: Bytes, path: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode the first frame in the file's own mode, with its EXIF orientation applied."""
    image = open_header(stream_over(memoryview(data)), path, max_pixels)  # without a copy of a staged file
    image.load()
    transpose = UPRIGHT.get(_orientation(image))
    return image if transpose is None else image.transpose(transpose)


def open_header(stream: BinaryIO, path: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open an image without decoding it. Raises UnreadableMediaError if it has too many pixels."""
    if stream.seek(0, io.SEEK_END) == 0:
        raise UnreadableMediaError(path, "the file is empty (0 bytes)")
    stream.seek(0)
    with NO_BOMB_WARNINGS:
        image = Image.open(stream)
    pixels = image.width * image.height
    if pixels > max_pixels:
        raise UnreadableMediaError(path, too_large(f"{image.width}x{image.height}", pixels, max_pixels))
    return image


def size_upright(image: Image.Image, stream: BinaryIO) -> tuple[int, int]:
    """Width and height after EXIF orientation. Decodes only files that store their EXIF after the pixels."""
    if image.format == "TIFF":  # Pillow has already swapped the sides
        return image.size
    if image.format == "PNG" and "exif" not in image.info and not _png_describes_itself_late(stream):
        return image.size
    sideways = _orientation(image) >= 5  # 5 to 8 swap width and height
    return (image.height, image.width) if sideways else image.size


def fit_to_bucket(
    image: Image.Image, path: str, fit: Fit, bucket: Bucket, method: Image.Resampling = Image.Resampling.LANCZOS
) -> Image.Image:
    """Scale with antialiasing, then crop. Checks the size first, because the crop is valid only for this image."""
    if image.size != fit.original:
        raise DataError(
            f"{path}: {image.width}x{image.height} now, {fit.original[0]}x{fit.original[1]} when the dataset was "
            "scanned; start the run again to scan it again"
        )
    right, bottom = fit.left + bucket.width, fit.top + bucket.height
    if min(fit.left, fit.top) < 0 or right > fit.resized[0] or bottom > fit.resized[1]:
        crop = (fit.left, fit.top, right, bottom)
        raise DataError(f"{path}: the crop {crop} extends beyond the scaled image {fit.resized}")
    resized = image if image.size == fit.resized else image.resize(fit.resized, method)
    return resized.crop((fit.left, fit.top, right, bottom))


@contextmanager
def damage_named(path: str) -> Iterator[None]:
    """Turn any exception of Pillow for a damaged file into UnreadableMediaError."""
    try:
        yield
    except Image.DecompressionBombError as error:
        megapixels = 2 * (Image.MAX_IMAGE_PIXELS or 0) / 1e6  # Pillow's hard limit is twice its warning limit
        raise UnreadableMediaError(path, f"more than {megapixels:.0f} megapixels; scale it down") from error
    except UnidentifiedImageError as error:
        raise UnreadableMediaError(path, "not an image of a supported format, or its header is damaged") from error
    except _DAMAGE as error:
        raise UnreadableMediaError(path, f"the image cannot be decoded: {error}") from error


def too_large(size: str, pixels: int, max_pixels: int) -> str:
    return f"{size} is {pixels / 1e6:.1f} megapixels, more than the {max_pixels / 1e6:.1f} allowed; scale it down"


def _rgb(image: Image.Image, path: str, own_colours: bool) -> Image.Image:
    profile = image.info.get("icc_profile")
    if image.mode.startswith(("I", "F")):
        return eight_bits(image, path).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
    elif image.mode != "CMYK":
        image = image.convert("RGB")
    image = _srgb(image, profile)
    if image.mode != "RGBA" or own_colours:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def eight_bits(image: Image.Image, path: str) -> Image.Image:
    """Convert 16-bit or 32-bit grayscale to 8 bits, if the range of its values has a clear meaning."""
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if image.mode == "F":
        if not (low >= 0 and high <= 1):  # NaN fails this comparison too
            raise UnreadableMediaError(path, f"floats from {low} to {high}, expected 0 to 1; save it with 8 or 16 bits")
        return Image.fromarray(np.rint(values * 255).astype(np.uint8))
    if low < 0 or high > 65535:
        raise UnreadableMediaError(path, f"gray values from {low} to {high}, expected 0 to 65535; save it with 16 bits")
    # 65535 maps to 255, rounded to nearest in integers.
    return Image.fromarray(((values.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8))


def _srgb(image: Image.Image, profile: object) -> Image.Image:
    if not isinstance(profile, bytes) or not profile:
        return image
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if source.profile.xcolor_space.strip() != image.mode.removesuffix("A"):
            return image
        if "sRGB" in ImageCms.getProfileDescription(source):
            return image
        target = ImageCms.createProfile("sRGB")
        mode = "RGB" if image.mode == "CMYK" else image.mode
        return ImageCms.profileToProfile(image, source, target, outputMode=mode) or image
    except (ImageCms.PyCMSError, OSError, ValueError):  # the profile is damaged, but not the image
        return image


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation from 1 to 8. Unreadable EXIF counts as 1, because the image itself may be intact."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except (SyntaxError, struct.error, ValueError, KeyError, IndexError, TypeError):
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


_DESCRIBING = {b"eXIf", b"iTXt", b"tEXt", b"zTXt"}


def _png_describes_itself_late(stream: BinaryIO) -> bool:
    """Whether text or EXIF follows the pixels, where Pillow finds it only by decoding. Reads chunk headers only."""
    stream.seek(8)
    after_pixels = False
    while len(header := stream.read(8)) == 8:
        length, kind = int.from_bytes(header[:4], "big"), header[4:]
        if after_pixels and kind in _DESCRIBING:
            return True
        after_pixels |= kind == b"IDAT"
        stream.seek(length + 4, io.SEEK_CUR)
    return False
