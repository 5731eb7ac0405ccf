"""Detecting truncated media, mostly without decoding them. An interrupted download is the most common damage.

Images: only formats that mark their end are checked. Other damage is found when the image is decoded. An image reported
as truncated here is one that its decoder rejects as well.

Video and audio: the lengths stored in the containers decide. After an interrupted download, most formats play without
an error but end early. Checked are mp4, mov and m4a, mkv and webm, avi, wmv and wma, wav, aiff, and ogg. Streams that
store no length (ts, mpg, raw aac) cannot be checked, nor can files whose writer left the length open. Data appended to
a complete file is ignored.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO, Literal

from PIL import Image, ImageChops

from gracetune.data.backends.stream import whole_bytes
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.media.image import damage_named

# -- images ------------------------------------------------------------------------------------------------------------


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


# -- clips and sounds --------------------------------------------------------------------------------------------------


_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_ASF = b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"
_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"styp")
_MEDIA_BOXES = (b"moov", b"moof", b"mdat")
_OPEN_LENGTH = 0x7FFFF000
"""32-bit lengths from here on mean "unknown": FFmpeg writes 2^32 - 1 to streams and SoX nearly 2^31."""
_OGG_HEADER, _OGG_LARGEST = 27, 27 + 255 + 255 * 255


def reject_cut_off(stream: BinaryIO, path: str) -> None:
    """Raise UnreadableMediaError if the file is shorter than its container says."""
    size = stream.seek(0, io.SEEK_END)
    complete = whole_size(stream)
    if complete is not None and complete > size:
        raise UnreadableMediaError(path, f"truncated: {size} of at least {complete} bytes")


def whole_size(stream: BinaryIO) -> int | None:
    """The minimum size of the complete file according to its container; None if it does not say."""
    head = _at(stream, 0, 12)
    if head[4:8] in _BOXES:
        return _end_of_boxes(stream)
    if head.startswith(_EBML):
        return _end_of_segment(stream)
    if head.startswith(_ASF):
        return _end_of_asf(stream)
    if head.startswith(b"OggS"):
        return _end_of_page(stream)
    if head.startswith((b"RIFF", b"RF64")) and head[8:] == b"WAVE":
        return _end_of_sound(stream, "little", b"data")
    if head.startswith(b"FORM") and head[8:11] == b"AIF":
        return _end_of_sound(stream, "big", b"SSND")
    if head.startswith(b"RIFF") and head[8:] == b"AVI ":
        return _end_of_avi(stream)
    return None


def _at(stream: BinaryIO, offset: int, count: int) -> bytes:
    stream.seek(offset)
    return stream.read(count)


def _end_of_boxes(stream: BinaryIO) -> int | None:
    """MP4 and MOV: the end of the last box with media.

    A box is a 32-bit big-endian length that includes itself, four letters, and the content. Length 1 means that a
    64-bit length follows the letters.
    """
    offset, end = 0, None
    while len(head := _at(stream, offset, 16)) >= 8:
        length = int.from_bytes(head[:4], "big")
        if length == 1:
            length = int.from_bytes(head[8:], "big")
        if length < 8:  # 0: the box extends to the end of the file; other values are invalid
            break
        offset += length
        if head[4:8] in _MEDIA_BOXES:
            end = offset
    return end


def _end_of_segment(stream: BinaryIO) -> int | None:
    """Matroska and WebM: the end of the segment, the single element after the file's header."""
    header, offset = _number(stream, 4)
    offset += header or 0
    if _at(stream, offset, 4) != _SEGMENT:
        return None
    length, start = _number(stream, offset + 4)
    return None if length is None else start + length


def _number(stream: BinaryIO, offset: int) -> tuple[int | None, int]:
    """Read an EBML number. Returns its value, None for the reserved "unknown", and the offset after it.

    The number of leading zero bits in the first byte gives the width in bytes. After the first one bit, 7 bits per byte
    are the value. All ones mean "unknown".
    """
    data = _at(stream, offset, 8)
    width = 9 - data[0].bit_length() if data and data[0] else 8
    value = int.from_bytes(data[:width], "big") & ((1 << 7 * width) - 1)
    return (None if value == (1 << 7 * width) - 1 else value), offset + width


def _end_of_asf(stream: BinaryIO) -> int | None:
    """WMV and WMA: the header is one object and the packets are the next; an index may follow."""
    header = int.from_bytes(_at(stream, 16, 8), "little")
    packets = int.from_bytes(_at(stream, header + 16, 8), "little")
    return header + packets if packets else None


def _end_of_page(stream: BinaryIO) -> int | None:
    """Ogg: the end of the last page, from its header and the table of its segment sizes."""
    start = max(0, stream.seek(0, io.SEEK_END) - _OGG_LARGEST)
    tail = _at(stream, start, _OGG_LARGEST)
    page = tail.rfind(b"OggS\0")
    if page < 0:
        return None
    header = tail[page : page + _OGG_HEADER]
    if len(header) < _OGG_HEADER:
        return start + page + _OGG_HEADER
    table = tail[page + _OGG_HEADER : page + _OGG_HEADER + header[-1]]
    return start + page + _OGG_HEADER + header[-1] + sum(table)


def _end_of_avi(stream: BinaryIO) -> int | None:
    """AVI: the end of the last RIFF chunk. Large files have several."""
    chunks = _chunks(stream, 0, "little")
    return max((end for kind, start, end in chunks if kind == b"RIFF" and end - start < _OPEN_LENGTH), default=None)


def _end_of_sound(stream: BinaryIO, order: Literal["little", "big"], wanted: bytes) -> int | None:
    """WAV and AIFF: the end of the chunk with the samples."""
    long_length = None
    for kind, start, end in _chunks(stream, 12, order):
        if kind == b"ds64":  # the 64-bit lengths of a wav file above 4 GiB
            long_length = int.from_bytes(_at(stream, start + 16, 8), "little")
        if kind != wanted:
            continue
        if long_length is not None:
            return start + 8 + long_length
        length = end - start - 8
        return end if 0 < length < _OPEN_LENGTH else None
    return None


def _chunks(stream: BinaryIO, offset: int, order: Literal["little", "big"]) -> Iterator[tuple[bytes, int, int]]:
    """The name, start and end of each RIFF or IFF chunk. Chunks are padded to an even length."""
    while len(head := _at(stream, offset, 8)) == 8:
        length = int.from_bytes(head[4:], order)
        yield head[:4], offset, offset + 8 + length
        offset += 8 + length + length % 2
