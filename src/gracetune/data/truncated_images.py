"""Detecting truncated images, mostly without decoding them. An interrupted download is the most common damage.

Only formats that mark their end are checked. Other damage is found when the image is decoded. An image reported as
truncated here is one that its decoder rejects as well.
"""

from __future__ import annotations

import io

from PIL import Image, ImageChops

from gracetune.data.backends.stream import whole_bytes
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.media.image import damage_named

_JPEG, _PNG, _RIFF = b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"RIFF"
_CHECKSUM = 4
"""The checksum after a PNG's last pixels, which decoders do not need."""
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, b"\xff\xd9"


def truncation(data: bytes | memoryview) -> str | None:
    """What is missing from an image file, as text; None if it is complete as far as can be told."""
    view = memoryview(data)
    head = bytes(view[:12])
    if head.startswith(_JPEG):
        return _jpeg(whole_bytes(view) or bytes(view))
    if head.startswith(_PNG):
        return _png(view)
    if head.startswith(_RIFF) and head[8:] == b"WEBP":
        size = int.from_bytes(head[4:8], "little") + 8
        return f"truncated: {len(view)} of {size} bytes" if len(view) < size else None
    return None


def _jpeg(data: bytes) -> str | None:
    """Look for an end marker after the pixels. A thumbnail in the header may have one too, so walk the segments first.

    A segment is 0xFF, a marker byte, a 16-bit big-endian length that includes itself, and its content.
    """
    offset = 2
    while offset + 4 <= len(data) and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker == _START_OF_SCAN:
            is_complete = data.find(_END_OF_IMAGE, offset) >= 0 or _is_complete_without_end(data)
            return None if is_complete else "truncated: the image has no end"
        if marker == 0xFF:  # a fill byte
            offset += 1
            continue
        offset += 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
    # The loop also ends at unexpected bytes between segments, which a decoder may tolerate.
    return "truncated before the pixels" if offset + 4 > len(data) else None


def _is_complete_without_end(data: bytes) -> bool:
    """Whether a JPEG without an end marker still holds all of its pixels.

    A decoder fills missing pixels from whatever bytes follow. So decode the file twice, once with other bytes appended:
    both images must be equal. Zeros at the end are removed first, because an interrupted download into a preallocated
    file leaves them.
    """
    padded = data.rstrip(b"\0") + b"\x55" * 4096 + _END_OF_IMAGE
    try:
        with damage_named("a JPEG without its end"):
            original, changed = (Image.open(io.BytesIO(content)).convert("RGB") for content in (data, padded))
    except UnreadableMediaError:
        return False
    return ImageChops.difference(original, changed).getbbox() is None


def _png(view: memoryview) -> str | None:
    """Check whether the file ends inside the pixel data (IDAT chunks) or before it.

    A chunk is a 32-bit big-endian length, four letters, the content and a 32-bit checksum. Decoders accept a file that
    lacks only the last checksum or the end chunk.
    """
    offset, has_pixels = len(_PNG), False
    while offset + 8 <= len(view):
        length, kind = int.from_bytes(view[offset : offset + 4], "big"), bytes(view[offset + 4 : offset + 8])
        if kind == b"IDAT":
            has_pixels = True
            if offset + 8 + length - _CHECKSUM > len(view):
                return f"truncated: the file ends after {len(view)} bytes, inside its pixels"
        if kind == b"IEND":
            return None
        offset += 12 + length
    return None if has_pixels else "truncated before the pixels"
