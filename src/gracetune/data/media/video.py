"""Video: the frames a clip asks for, by their timestamps, upright and in sRGB-like colours.

Times count from the first frame shown, whatever the container starts with. "The frame at t" is the one on screen then:
the last whose timestamp is not after t. That is right for variable frame rates, where counting frames is not.
Only what lies between the keyframe before a clip and its end is decoded. HDR (PQ, HLG) is brought to BT.709 with HDR's
reference white as white; what is brighter is clipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import BinaryIO

import av
from av.container import InputContainer
from av.error import FFmpegError
from av.sidedata.sidedata import SideData
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import ColorPrimaries, Colorspace, ColorTrc, VideoReformatter
from av.video.stream import VideoStream
from PIL import Image

from gracetune.data.errors import UnreadableMediaError
from gracetune.data.media.image import MAX_PIXELS, fit_to_bucket, too_large
from gracetune.data.refs import Bucket, Clip, Fit

EARLY = 0.001
"""Matroska writes whole milliseconds: a frame this much after a time still counts as on screen."""
_FAR = 4.0
"""Seconds between two wanted frames from which on looking for a keyframe in between beats decoding everything."""
_UNSPECIFIED = 2  # what a stream that says nothing about its colours has in `colorspace`
_HDR = (ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67)


def decode_video(
    stream: BinaryIO, path: str, clip: Clip, fit: Fit, bucket: Bucket, *, threads: int = 1, max_pixels: int = MAX_PIXELS
) -> list[Image.Image]:
    """`bucket.frames` pictures of exactly the bucket's size. One thread: the loader's workers are the parallelism."""
    reading = _Reading()
    times = None if clip.numbers is None else _times_of(stream, path, clip.numbers)
    while True:
        with opened(stream, path, seeks=reading.seeks) as video:
            video.stream.codec_context.thread_count = threads
            painter = _Painter(video, max_pixels)
            pictures: list[Image.Image] = []
            previous = None
            try:
                # Frames are let go of one by one: a clip of them at full size may not fit into memory.
                for frame in _wanted(video, clip, bucket.frames, reading, times):
                    # A frame that is on screen twice is converted once.
                    again = frame is previous
                    pictures.append(pictures[-1] if again else _fitted(painter.picture(frame), path, fit, bucket))
                    previous = frame
            except _AgainError as other:
                reading = other.reading
                continue
            return pictures


def _fitted(picture: Image.Image, path: str, fit: Fit, bucket: Bucket) -> Image.Image:
    """Damage can hit what a frame says about its own shape: another size is this file's fault, not the run's."""
    if picture.size != fit.original:
        found, known = (f"{width}x{height}" for width, height in (picture.size, fit.original))
        raise UnreadableMediaError(path, f"a frame of {found} in a video of {known}: it is damaged or was exchanged")
    return fit_to_bucket(picture, path, fit, bucket)


@dataclass(frozen=True)
class _Reading:
    """How a file is read through for a clip. The usual way first; what it meets may ask for another."""

    seeks: bool = True
    skipped: int | None = None
    """Frames behind the keyframe that are not taken; None where the clip's start decides."""


class _AgainError(Exception):
    """The clip has to be read in another way. Never raised for the ways it leads to, so there is an end."""

    def __init__(self, reading: _Reading) -> None:
        super().__init__(f"to be read again: {reading}")
        self.reading = reading


def _missed() -> _AgainError:
    """Seeking led past what is wanted (MPEG-TS has no table to seek by): read from the first frame on instead."""
    return _AgainError(_Reading(seeks=False))


@dataclass(frozen=True)
class Video:
    """An open file and the stream of it that is shown."""

    path: str
    container: InputContainer
    stream: VideoStream
    seeks: bool = True

    @property
    def origin(self) -> Fraction:
        return (self.stream.start_time or 0) * self.tick

    @property
    def tick(self) -> Fraction:
        return self.stream.time_base or Fraction(1, av.time_base)

    def at(self, frame: VideoFrame) -> float:
        """Seconds since the first frame."""
        if frame.pts is None:
            raise UnreadableMediaError(self.path, "its frames carry no timestamps; put it into an mp4 or mkv file")
        return float(frame.pts * (frame.time_base or self.tick) - self.origin)

    def end(self, frame: VideoFrame) -> float:
        """When a frame leaves the screen, if no other follows."""
        rate = self.stream.average_rate or self.stream.guessed_rate
        shown = frame.duration * self.tick if frame.duration else 1 / rate if rate else Fraction(0)
        return self.at(frame) + float(shown)

    def read_from(self, time: float) -> Iterator[VideoFrame]:
        """Every frame from the last keyframe before a time on. Without seeking, good for one call only."""
        if not self.seeks or time <= 0:
            yield from self.container.decode(self.stream)
            return
        try:
            self.container.seek(round((Fraction(time) + self.origin) / self.tick), stream=self.stream)
        except FFmpegError as error:
            raise _missed() from error
        first = next(self.container.decode(self.stream), None)
        if first is None or self.at(first) > time + EARLY:
            raise _missed()
        yield first
        yield from self.container.decode(self.stream)


@contextmanager
def opened(stream: BinaryIO, path: str, *, seeks: bool = True) -> Iterator[Video]:
    """Whatever FFmpeg finds wrong, now or while decoding, becomes the one error that names the file."""
    with container_of(stream, path) as container:
        shown = [found for found in container.streams.video if not found.disposition & Disposition.attached_pic]
        if not shown:
            raise UnreadableMediaError(path, "there is no video in it")
        if shown[0].codec_context is None:
            raise UnreadableMediaError(path, "its video is of a kind FFmpeg cannot decode, or damaged")
        yield Video(path, container, shown[0], seeks)


@contextmanager
def container_of(stream: BinaryIO, path: str) -> Iterator[InputContainer]:
    try:
        stream.seek(0)
        with av.open(stream, "r", metadata_errors="replace") as container:
            yield container
    except FFmpegError as error:
        what = "the file is empty (0 bytes)" if _is_empty(stream) else f"cannot be decoded: {error.strerror}"
        raise UnreadableMediaError(path, what) from error
    except IndexError as error:  # PyAV's, for a stream that appears only in the middle of a damaged MPEG-TS
        raise UnreadableMediaError(path, "cannot be decoded: it changes its streams on the way") from error


def orientation_of(frame: VideoFrame) -> Image.Transpose | None:
    """What brings a frame upright, from the container's display matrix."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if not isinstance(matrix, SideData):
        return None
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(matrix))
    # A point (x, y), y downwards, goes to (a x + c y, b x + d y); slanted ones are taken for the nearest quarter turn.
    upright = abs(a) >= abs(b)
    signs = (_sign(a), 0, 0, _sign(d)) if upright else (0, _sign(b), _sign(c), 0)
    return _TRANSPOSES.get(signs)


def size_shown(stream: VideoStream, frame: VideoFrame) -> tuple[int, int]:
    """Width and height with square pixels, upright."""
    width, height = _square(stream, frame)
    return (height, width) if orientation_of(frame) in _SIDEWAYS else (width, height)


_TRANSPOSES = {
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,  # Pillow turns counterclockwise
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}
_SIDEWAYS = {turn for signs, turn in _TRANSPOSES.items() if signs[0] == 0}


def shown_packets(video: Video) -> list[tuple[int, int]]:
    """Time and duration of every frame that is shown, in ticks and in the order they are shown. Decodes nothing."""
    shown = [
        (packet.pts, packet.duration or 0)
        for packet in video.container.demux(video.stream)
        if packet.pts is not None and packet.size and not packet.is_discard
    ]
    if not shown:
        raise UnreadableMediaError(video.path, "its frames carry no timestamps; put it into an mp4 or mkv file")
    return sorted(shown)


def _times_of(stream: BinaryIO, path: str, numbers: tuple[int, ...]) -> list[float]:
    """When the frames with these numbers are shown; behind the end, the last one."""
    with opened(stream, path) as video:
        shown = shown_packets(video)
        times = (shown[min(number, len(shown) - 1)][0] for number in numbers)
        return [float(time * video.tick - video.origin) for time in times]


def _wanted(
    video: Video, clip: Clip, count: int, reading: _Reading, times: list[float] | None = None
) -> Iterator[VideoFrame]:
    if times is not None:
        return _shown_at(video, clip, times)
    if clip.spread:
        slice_ = clip.duration / count
        return _shown_at(video, clip, [clip.start + (index + 0.5) * slice_ for index in range(count)])
    if clip.fps is not None:
        return _shown_at(video, clip, [clip.start + index / clip.fps for index in range(count)])
    if reading.skipped is not None:
        return islice(video.read_from(clip.start), reading.skipped, reading.skipped + count)
    return _in_a_row(video, clip, count)


def _shown_at(video: Video, clip: Clip, times: list[float]) -> Iterator[VideoFrame]:
    frames = video.read_from(times[0])
    shown, following = None, next(frames, None)
    for time in times:
        if video.seeks and following is not None and time - video.at(following) > _FAR:
            frames = video.read_from(time)
            following = next(frames, None)
        while following is not None and (shown is None or video.at(following) <= time + EARLY):
            shown, following = following, next(frames, None)
        if shown is None or (following is None and time >= video.end(shown)):
            raise _short(video, clip, shown)
        yield shown


def _in_a_row(video: Video, clip: Clip, count: int) -> Iterator[VideoFrame]:
    """Consecutive frames from the one on screen at the start.

    Where a variable rate leaves fewer than that until the end, the last ones of the file: it is long enough.
    """
    seen = taken = 0
    last: VideoFrame | None = None
    shown: VideoFrame | None = None
    for frame in video.read_from(clip.start):
        seen, last = seen + 1, frame
        if video.at(frame) <= clip.start + EARLY:
            shown = frame
            continue
        if shown is not None:
            yield shown
            shown, taken = None, 1
        if taken < count:
            yield frame
            taken += 1
        if taken == count:
            return
    if shown is not None and count == 1:
        yield shown
        return
    if seen >= count:
        raise _AgainError(_Reading(video.seeks, skipped=seen - count))
    if video.seeks and clip.start > 0:
        raise _missed()  # the frames before the keyframe are needed too
    raise _short(video, clip, last, f"{count} frames")


def _short(video: Video, clip: Clip, last: VideoFrame | None, what: str = "frames") -> UnreadableMediaError:
    end = 0.0 if last is None else video.end(last)
    piece = f"{clip.start:.2f} to {clip.start + clip.duration:.2f} s"
    return UnreadableMediaError(video.path, f"ends after {end:.2f} s, and the clip needs {what} from {piece}")


class _Painter:
    """Turns frames into pictures; keeps one converter, whose tables for HDR take a second to build."""

    def __init__(self, video: Video, max_pixels: int) -> None:
        self._video, self._max_pixels = video, max_pixels
        self._reformatter = VideoReformatter()
        self._turn: tuple[Image.Transpose | None] | None = None

    def picture(self, frame: VideoFrame) -> Image.Image:
        if frame.is_corrupt:  # FFmpeg has filled in what it could not decode
            raise UnreadableMediaError(self._video.path, f"the frame at {self._video.at(frame):.2f} s is damaged")
        square = _square(self._video.stream, frame)
        pixels = frame.height * max(frame.width, square[0])
        if pixels > self._max_pixels:
            reason = too_large(f"{square[0]}x{square[1]}", pixels, self._max_pixels)
            raise UnreadableMediaError(self._video.path, reason)
        hdr = frame.color_trc in _HDR
        rgb = self._reformatter.reformat(
            frame,
            format="rgb24",
            src_colorspace=_colorspace(frame),
            dst_color_trc=ColorTrc.BT709 if hdr else None,
            dst_color_primaries=ColorPrimaries.BT709 if hdr else None,
            threads=1,
        )
        picture = Image.fromarray(rgb.to_ndarray())
        if picture.size != square:
            picture = picture.resize(square, Image.Resampling.LANCZOS)
        # Once per file: asking a frame for it ties the frame into a cycle, which holds its pixels until the next
        # garbage collection.
        self._turn = self._turn or (orientation_of(frame),)
        return picture if self._turn[0] is None else picture.transpose(self._turn[0])


def _square(stream: VideoStream, frame: VideoFrame) -> tuple[int, int]:
    shape = stream.sample_aspect_ratio
    return (max(1, round(frame.width * shape)) if shape else frame.width, frame.height)


def _colorspace(frame: VideoFrame) -> Colorspace | None:
    """Players take silent files of more than standard definition for BT.709; FFmpeg alone would take BT.601."""
    large = frame.width >= 1280 or frame.height > 576
    return Colorspace.ITU709 if frame.colorspace == _UNSPECIFIED and large else None


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


def _is_empty(stream: BinaryIO) -> bool:
    return stream.seek(0, 2) == 0
