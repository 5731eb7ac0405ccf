"""Videos and sounds whose end is missing, found by what their containers say about their own length.

An interrupted download of most formats plays without complaint, only shorter. Judged are mp4 and mov (m4a too), mkv and
webm, avi, wmv and wma, wav, aiff and ogg; streams without a length (ts, mpg, raw aac) cannot be. A file whose writer
left its length open is not judged either, and neither is what somebody appended to a whole one.
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
"""From here on a 32-bit length is what programs write that do not know it yet: FFmpeg 2^32 - 1, SoX nearly 2^31."""
_OGG_HEADER, _OGG_LARGEST = 27, 27 + 255 + 255 * 255


def refuse_cut_off(stream: BinaryIO, path: str) -> None:
    size = stream.seek(0, io.SEEK_END)
    whole = whole_size(stream)
    if whole is not None and whole > size:
        raise UnreadableMediaError(path, f"cut off: {size} of at least {whole} bytes")


def whole_size(stream: BinaryIO) -> int | None:
    """How many bytes a file has at least, by its own account; None where it gives none."""
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


def _at(stream: BinaryIO, place: int, count: int) -> bytes:
    stream.seek(place)
    return stream.read(count)


def _end_of_boxes(stream: BinaryIO) -> int | None:
    """The end of the last box with media in it."""
    place, end = 0, None
    while len(head := _at(stream, place, 16)) >= 8:
        length = int.from_bytes(head[:4], "big")
        if length == 1:
            length = int.from_bytes(head[8:], "big")
        if length < 8:  # 0: up to the end of the file; anything else is no box
            break
        place += length
        if head[4:8] in _MEDIA_BOXES:
            end = place
    return end


def _end_of_segment(stream: BinaryIO) -> int | None:
    """Of Matroska's one segment, behind the file's header."""
    header, place = _number(stream, 4)
    place += header or 0
    if _at(stream, place, 4) != _SEGMENT:
        return None
    length, start = _number(stream, place + 4)
    return None if length is None else start + length


def _number(stream: BinaryIO, place: int) -> tuple[int | None, int]:
    """EBML's numbers say in their first bits how long they are. All ones: unknown. Also where the number ends."""
    data = _at(stream, place, 8)
    width = 9 - data[0].bit_length() if data and data[0] else 8
    value = int.from_bytes(data[:width], "big") & ((1 << 7 * width) - 1)
    return (None if value == (1 << 7 * width) - 1 else value), place + width


def _end_of_asf(stream: BinaryIO) -> int | None:
    """The header is one object, the packets are the next; an index may follow."""
    header = int.from_bytes(_at(stream, 16, 8), "little")
    packets = int.from_bytes(_at(stream, header + 16, 8), "little")
    return header + packets if packets else None


def _end_of_page(stream: BinaryIO) -> int | None:
    """Of the last page of an Ogg file."""
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
    """A large one is several RIFF chunks in a row."""
    ends = [end for kind, place, end in _chunks(stream, 0, "little") if kind == b"RIFF" and end - place < _OPEN_LENGTH]
    return max(ends, default=None)


def _end_of_sound(stream: BinaryIO, order: Literal["little", "big"], wanted: bytes) -> int | None:
    long_length = None
    for kind, place, end in _chunks(stream, 12, order):
        if kind == b"ds64":  # of a wav above 4 GiB
            long_length = int.from_bytes(_at(stream, place + 16, 8), "little")
        if kind != wanted:
            continue
        if long_length is not None:
            return place + 8 + long_length
        length = end - place - 8
        return end if 0 < length < _OPEN_LENGTH else None
    return None


def _chunks(stream: BinaryIO, place: int, order: Literal["little", "big"]) -> Iterator[tuple[bytes, int, int]]:
    """The name, beginning and end of each."""
    while len(head := _at(stream, place, 8)) == 8:
        length = int.from_bytes(head[4:], order)
        yield head[:4], place, place + 8 + length
        place += 8 + length + length % 2
