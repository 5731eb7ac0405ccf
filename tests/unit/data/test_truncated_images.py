from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gracetune.data.media.truncated import truncation
from unit.data.media.generated import generated_image, image_bytes

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 56, 3), np.uint8))
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("JPEG", {"optimize": True, "quality": 40}),
    ("PNG", {}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
]


def decodes(data: bytes) -> bool:
    try:
        Image.open(io.BytesIO(data)).load()
    except (OSError, SyntaxError, ValueError):
        return False
    return True


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_every_point_of_truncation(kind: str, options: dict[str, Any]) -> None:
    """Files are reported as truncated if and only if they do not decode."""
    data = image_bytes(NOISE, kind, **options)
    assert truncation(data) is None
    for length in range(16, len(data)):
        assert (truncation(data[:length]) is None) == decodes(data[:length]), length


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_data_after_the_image_is_ignored(kind: str, options: dict[str, Any]) -> None:
    """Phones append a video, cameras a preview."""
    data = image_bytes(NOISE, kind, **options)
    assert truncation(data + b"ftypmp42" * 5_000) is None


def test_the_end_of_a_thumbnail_is_not_the_end_of_its_image() -> None:
    thumbnail = image_bytes(generated_image(16, 16), "JPEG")
    data = image_bytes(NOISE, "JPEG", exif=b"Exif\0\0" + thumbnail)
    assert b"\xff\xd9" in data[: len(data) // 2]
    assert truncation(data) is None
    assert truncation(data[:-30]) is not None


class TestWithoutItsEndMarker:
    """A baseline JPEG with all pixels, and one that only looks complete."""

    DATA = image_bytes(NOISE, "JPEG")

    @pytest.mark.parametrize("tail", [b"\0" * 100, b"appended by a phone", b"\0\0\0\x20ftypmp42" * 50])
    def test_a_file_with_all_pixels_is_complete(self, tail: bytes) -> None:
        data = self.DATA[:-2] + tail
        assert decodes(data)
        assert truncation(data) is None

    @pytest.mark.parametrize("missing", [40, 200, 800])
    @pytest.mark.parametrize("tail", [b"", b"\0" * 3000, b"\0" * 5])
    def test_a_file_with_missing_pixels_is_truncated(self, missing: int, tail: bytes) -> None:
        """A download into a preallocated file leaves zeros, which the decoder takes for pixels."""
        assert truncation(self.DATA[:-missing] + tail) == "truncated: the image has no end"


def test_other_formats_are_not_checked() -> None:
    for data in (b"", b"GIF89a", b"BM", b"\0" * 100, image_bytes(NOISE, "BMP")[:100], image_bytes(NOISE, "TIFF")[:90]):
        assert truncation(data) is None
