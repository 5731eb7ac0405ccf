"""Detecting truncated video and audio files by the lengths stored in their containers.

After an interrupted download, most formats play without an error but end early. Checked are mp4, mov and m4a, mkv and
webm, avi, wmv and wma, wav, aiff, and ogg. Streams that store no length (ts, mpg, raw aac) cannot be checked, nor can
files whose writer left the length open. Data appended to a complete file is ignored.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO, Literal

from gracetune.data.errors import UnreadableMediaError

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
