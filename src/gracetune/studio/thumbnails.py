"""Thumbnails of images and of the first frame of clips, with bounds on what a hostile file can cost."""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from pathlib import Path

from PIL import Image

from gracetune.data.errors import UnreadableMediaError
from gracetune.data.media import kind_of
from gracetune.data.media.image import UPRIGHT, damage_named, eight_bits, open_header
from gracetune.data.media.video import open_video, orientation_of
from gracetune.storage.regular_files import open_regular
from gracetune.studio.replies import StudioError

SIDE = 400
MOST_PIXELS = 89_478_485
"""The limit of the data loader, so that every sample has a thumbnail."""
LARGEST_IMAGE = 512 << 20
"""In bytes, of an image file."""
_MOST_BYTES = 32 << 20
_AT_ONCE = 2
_ORIENTATION = 274


class Thumbnails:
    """Makes thumbnails and keeps the last ones, up to 32 MiB. Thread-safe."""

    def __init__(self) -> None:
        self._mutex, self._free = threading.Lock(), threading.BoundedSemaphore(_AT_ONCE)
        self._kept: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._size = 0

    def of(self, path: Path) -> bytes:
        """A JPEG. Raises StudioError if the file cannot be decoded."""
        found = path.stat()
        key = (str(path), found.st_mtime_ns, found.st_size)
        with self._mutex:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        with self._free:
            try:
                data = _jpeg(_image(path) if kind_of(path.name) == "image" else _first_frame(path))
            except UnreadableMediaError as error:
                raise StudioError(404, f"{path.name}: {error.reason}", "an image or a clip", "see api/…/data") from None
        with self._mutex:
            if key not in self._kept:
                self._kept[key] = data
                self._size += len(data)
            while self._size > _MOST_BYTES:
                self._size -= len(self._kept.popitem(last=False)[1])
        return data


def _image(path: Path) -> Image.Image:
    with os.fdopen(open_regular(path), "rb") as file, damage_named(path.name):
        if os.fstat(file.fileno()).st_size > LARGEST_IMAGE:
            raise UnreadableMediaError(path.name, "a file of more than 512 MiB")
        image = open_header(file, path.name, MOST_PIXELS)
        kind = image.format
        image.draft("RGB", (2 * SIDE, 2 * SIDE))  # a JPEG is decoded at a fraction of its size
        orientation = image.getexif().get(_ORIENTATION)
        if image.mode.startswith(("I", "F")):
            image = eight_bits(image, path.name)
        elif image.mode == "P":  # its numbers are colours of a palette, which cannot be averaged
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        image.load()  # `thumbnail` does not load a small image, and the file is closed here
        image.thumbnail((SIDE, SIDE))
        transpose = UPRIGHT.get(orientation) if isinstance(orientation, int) and kind != "TIFF" else None
        return image if transpose is None else image.transpose(transpose)


def _first_frame(path: Path) -> Image.Image:
    with os.fdopen(open_regular(path), "rb") as file, open_video(file, path.name) as video, damage_named(path.name):
        codec = video.stream.codec_context
        if codec.width * codec.height > MOST_PIXELS:
            raise UnreadableMediaError(path.name, f"frames of {codec.width}x{codec.height}")
        codec.thread_count = 1
        frame = next(video.container.decode(video.stream), None)
        if frame is None or frame.width * frame.height > MOST_PIXELS:
            raise UnreadableMediaError(path.name, "no frame of a usual size")
        scale = min(1.0, SIDE / max(frame.width, frame.height))
        small = frame.reformat(max(1, int(frame.width * scale)), max(1, int(frame.height * scale)), "rgb24")
        image = Image.fromarray(small.to_ndarray())
        transpose = orientation_of(frame)
        return image if transpose is None else image.transpose(transpose)


def _jpeg(image: Image.Image) -> bytes:
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.new("RGBA", layer.size, "white")
        image.alpha_composite(layer)
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=82)
    return buffer.getvalue()
