from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gracetune.data.truncation import truncation
from unit.data.media.generated import image_bytes, picture

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
def test_every_place_a_file_can_be_cut_off_at(kind: str, options: dict[str, Any]) -> None:
    """Nothing that decodes is called truncated, and nothing that does not is missed."""
    data = image_bytes(NOISE, kind, **options)
    assert truncation(data) is None
    for length in range(16, len(data)):
        assert (truncation(data[:length]) is None) == decodes(data[:length]), length


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_what_follows_the_picture_does_not_matter(kind: str, options: dict[str, Any]) -> None:
    """Phones append a video, cameras a preview."""
    data = image_bytes(NOISE, kind, **options)
    assert truncation(data + b"ftypmp42" * 5_000) is None


def test_the_end_of_a_thumbnail_is_not_the_end_of_its_picture() -> None:
    thumbnail = image_bytes(picture(16, 16), "JPEG")
    data = image_bytes(NOISE, "JPEG", exif=b"Exif\0\0" + thumbnail)
    assert b"\xff\xd9" in data[: len(data) // 2]
    assert truncation(data) is None
    assert truncation(data[:-30]) is not None


class TestWithoutItsEndMarker:
    """A baseline JPEG whose pixels are all there, and one that only looks so."""

    DATA = image_bytes(NOISE, "JPEG")

    @pytest.mark.parametrize("tail", [b"\0" * 100, b"appended by a phone", b"\0\0\0\x20ftypmp42" * 50])
    def test_what_the_decoder_finds_whole_is_whole(self, tail: bytes) -> None:
        data = self.DATA[:-2] + tail
        assert decodes(data)
        assert truncation(data) is None

    @pytest.mark.parametrize("missing", [40, 200, 800])
    @pytest.mark.parametrize("tail", [b"", b"\0" * 3000, b"\0" * 5])
    def test_what_the_decoder_has_to_make_up_is_cut_off(self, missing: int, tail: bytes) -> None:
        """A download that had made room for all of it leaves zeros, which the decoder takes for pixels."""
        assert truncation(self.DATA[:-missing] + tail) == "cut off: the picture does not end"


def test_other_files_are_not_judged() -> None:
    for data in (b"", b"GIF89a", b"BM", b"\0" * 100, image_bytes(NOISE, "BMP")[:100], image_bytes(NOISE, "TIFF")[:90]):
        assert truncation(data) is None
