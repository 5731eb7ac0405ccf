"""Pictures whose end is missing, mostly found without decoding them: an interrupted download is the usual damage.

Only formats that say where they end are judged. Everything else, and damage in the middle, is found when the picture is
decoded; a picture that is called truncated here is one that its decoder refuses too.
"""

from __future__ import annotations

import io

from PIL import Image, ImageChops

from gracetune.data.backends.stream import whole_bytes
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.media.image import damage_named

_JPEG, _PNG, _RIFF = b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"RIFF"
_CHECKSUM = 4
"""Bytes behind a PNG's last pixels that decoders do without."""
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, b"\xff\xd9"


def truncation(data: bytes | memoryview) -> str | None:
    """What is missing from a picture file, in words; None where nothing is known to be."""
    view = memoryview(data)
    head = bytes(view[:12])
    if head.startswith(_JPEG):
        return _jpeg(whole_bytes(view) or bytes(view))
    if head.startswith(_PNG):
        return _png(view)
    if head.startswith(_RIFF) and head[8:] == b"WEBP":
        size = int.from_bytes(head[4:8], "little") + 8
        return f"cut off: {len(view)} of {size} bytes" if len(view) < size else None
    return None


def _jpeg(data: bytes) -> str | None:
    """An end marker follows the pixels. Before them a thumbnail may have one; behind it anything may come."""
    place = 2
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == _START_OF_SCAN:
            whole = data.find(_END_OF_IMAGE, place) >= 0 or _whole_without_end(data)
            return None if whole else "cut off: the picture does not end"
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    # Something stands between the segments that does not belong there: the decoder may still cope with it.
    return "cut off before the pixels" if place + 4 > len(data) else None


def _whole_without_end(data: bytes) -> bool:
    """Whether the decoder finds all pixels of a JPEG that has no end marker.

    It fills in what is missing, from whatever follows: other bytes there must not make another picture. Zeros at the
    end are no pixels: they are what a download leaves of a file it had made room for.
    """
    other = data.rstrip(b"\0") + b"\x55" * 4096 + _END_OF_IMAGE
    try:
        with damage_named("a JPEG without its end"):
            one, another = (Image.open(io.BytesIO(content)).convert("RGB") for content in (data, other))
    except UnreadableMediaError:
        return False
    return ImageChops.difference(one, another).getbbox() is None


def _png(view: memoryview) -> str | None:
    """Cut inside a chunk of pixels, or before the first. What only lacks a checksum or its end is still decoded."""
    place, pixels = len(_PNG), False
    while place + 8 <= len(view):
        length, kind = int.from_bytes(view[place : place + 4], "big"), bytes(view[place + 4 : place + 8])
        if kind == b"IDAT":
            pixels = True
            if place + 8 + length - _CHECKSUM > len(view):
                return f"cut off: {len(view)} bytes, and its pixels go on"
        if kind == b"IEND":
            return None
        place += 12 + length
    return None if pixels else "cut off before the pixels"
