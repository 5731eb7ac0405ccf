"""Decoding video: the frames of a clip, selected by timestamp, upright and in sRGB-like colors.

Times count from the first displayed frame, whatever the container's start time is. The frame at time t is the one
displayed then: the last with a timestamp not after t. This is correct for variable frame rates, where counting frames
is not. Only the part from the keyframe before a clip to its end is decoded. HDR (PQ, HLG) is converted to BT.709, which
maps HDR's reference white to white and clips brighter values.
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
"""In seconds. Matroska rounds times to milliseconds, so a frame that starts this much after a time still counts as
displayed."""
_FAR = 4.0
"""In seconds. If two wanted frames are farther apart, seeking to a keyframe is faster than decoding all in between."""
_UNSPECIFIED = 2  # the `colorspace` of a stream without color information
_HDR = (ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67)


def decode_video(
    stream: BinaryIO, path: str, clip: Clip, fit: Fit, bucket: Bucket, *, threads: int = 1, max_pixels: int = MAX_PIXELS
) -> list[Image.Image]:
    """Decode a clip to `bucket.frames` images in the bucket's size, by default with one thread."""
    reading = _Reading()
    times = None if clip.numbers is None else _times_of(stream, path, clip.numbers)
    while True:
        with open_video(stream, path, seeks=reading.seeks) as video:
            video.stream.codec_context.thread_count = threads
            converter = _FrameConverter(video, max_pixels)
            images: list[Image.Image] = []
            previous = None
            try:
                # Scale each frame at once and release it: a clip of full-size frames may not fit into memory.
                for frame in _wanted(video, clip, bucket.frames, reading, times):
                    # A frame that is displayed at several times is converted once.
                    is_same = frame is previous
                    images.append(images[-1] if is_same else _fitted(converter.image(frame), path, fit, bucket))
                    previous = frame
            except _RetryError as error:
                reading = error.reading
                continue
            return images


def _fitted(image: Image.Image, path: str, fit: Fit, bucket: Bucket) -> Image.Image:
    """Scale and crop a frame. A frame of a different size means a damaged file, not an error of the run."""
    if image.size != fit.original:
        found, known = (f"{width}x{height}" for width, height in (image.size, fit.original))
        reason = f"a frame of {found} in a video of {known}: the file is damaged or was replaced"
        raise UnreadableMediaError(path, reason)
    return fit_to_bucket(image, path, fit, bucket)


@dataclass(frozen=True)
class _Reading:
    """How to read a file for a clip. The defaults are tried first."""

    seeks: bool = True
    skipped: int | None = None
    """Frames after the keyframe to skip; None if the clip's start time decides."""


class _RetryError(Exception):
    """The clip must be read in another way. The other ways never raise this, so the loop ends."""

    def __init__(self, reading: _Reading) -> None:
        super().__init__(f"to be read again: {reading}")
        self.reading = reading


def _missed() -> _RetryError:
    """Seeking went past the wanted frame, because MPEG-TS has no seek table: read from the first frame instead."""
    return _RetryError(_Reading(seeks=False))


@dataclass(frozen=True)
class VideoSource:
    """An open file and its displayed video stream."""

    path: str
    container: InputContainer
    stream: VideoStream
    seeks: bool = True

    @property
    def origin(self) -> Fraction:
        """The container's time of the first frame, in seconds."""
        return (self.stream.start_time or 0) * self.tick

    @property
    def tick(self) -> Fraction:
        """The unit of timestamps, in seconds."""
        return self.stream.time_base or Fraction(1, av.time_base)

    def at(self, frame: VideoFrame) -> float:
        """The time of a frame in seconds since the first."""
        if frame.pts is None:
            raise UnreadableMediaError(self.path, "its frames have no timestamps; convert it to mp4 or mkv")
        return float(frame.pts * (frame.time_base or self.tick) - self.origin)

    def end(self, frame: VideoFrame) -> float:
        """The time until which a frame is displayed if no other follows."""
        rate = self.stream.average_rate or self.stream.guessed_rate
        shown = frame.duration * self.tick if frame.duration else 1 / rate if rate else Fraction(0)
        return self.at(frame) + float(shown)

    def read_from(self, time: float) -> Iterator[VideoFrame]:
        """Yield every frame from the last keyframe before `time` on. Without seeking, this works only once."""
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
def open_video(stream: BinaryIO, path: str, *, seeks: bool = True) -> Iterator[VideoSource]:
    """Open a video. Every error of FFmpeg inside the `with` block becomes UnreadableMediaError."""
    with container_of(stream, path) as container:
        shown = [found for found in container.streams.video if not found.disposition & Disposition.attached_pic]
        if not shown:
            raise UnreadableMediaError(path, "it contains no video")
        if shown[0].codec_context is None:
            raise UnreadableMediaError(path, "FFmpeg cannot decode its video: the codec is unsupported or damaged")
        yield VideoSource(path, container, shown[0], seeks)


@contextmanager
def container_of(stream: BinaryIO, path: str) -> Iterator[InputContainer]:
    """Open a container with FFmpeg and turn its errors into UnreadableMediaError."""
    try:
        stream.seek(0)
        with av.open(stream, "r", metadata_errors="replace") as container:
            yield container
    except FFmpegError as error:
        reason = "the file is empty (0 bytes)" if _is_empty(stream) else f"cannot be decoded: {error.strerror}"
        raise UnreadableMediaError(path, reason) from error
    except IndexError as error:  # raised by PyAV if a stream first appears in the middle of a damaged MPEG-TS file
        raise UnreadableMediaError(path, "cannot be decoded: its streams change midway") from error


def orientation_of(frame: VideoFrame) -> Image.Transpose | None:
    """The transposition that makes a frame upright, from the container's display matrix."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if not isinstance(matrix, SideData):
        return None
    # A 3x3 matrix of fixed-point numbers that maps a point (x, y), with y pointing down, to (a x + c y, b x + d y).
    # Other angles are rounded to the nearest quarter turn.
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(matrix))
    upright = abs(a) >= abs(b)
    signs = (_sign(a), 0, 0, _sign(d)) if upright else (0, _sign(b), _sign(c), 0)
    return _TRANSPOSES.get(signs)


def size_shown(stream: VideoStream, frame: VideoFrame) -> tuple[int, int]:
    """Width and height upright and with square pixels."""
    width, height = _square(stream, frame)
    return (height, width) if orientation_of(frame) in _SIDEWAYS else (width, height)


_TRANSPOSES = {
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,  # Pillow rotates counterclockwise
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}
_SIDEWAYS = {transpose for signs, transpose in _TRANSPOSES.items() if signs[0] == 0}


def shown_packets(video: VideoSource) -> list[tuple[int, int]]:
    """Time and duration of every displayed frame, in ticks and in display order, without decoding."""
    shown = [
        (packet.pts, packet.duration or 0)
        for packet in video.container.demux(video.stream)
        if packet.pts is not None and packet.size and not packet.is_discard
    ]
    if not shown:
        raise UnreadableMediaError(video.path, "its frames have no timestamps; convert it to mp4 or mkv")
    return sorted(shown)


def _times_of(stream: BinaryIO, path: str, numbers: tuple[int, ...]) -> list[float]:
    """The times of the frames with these numbers. Numbers beyond the end mean the last frame."""
    with open_video(stream, path) as video:
        shown = shown_packets(video)
        times = (shown[min(number, len(shown) - 1)][0] for number in numbers)
        return [float(time * video.tick - video.origin) for time in times]


def _wanted(
    video: VideoSource, clip: Clip, count: int, reading: _Reading, times: list[float] | None = None
) -> Iterator[VideoFrame]:
    """The frames of a clip, by the way it selects them."""
    if times is not None:
        return _shown_at(video, clip, times)
    if clip.spread:  # the middle of each of `count` equal intervals
        interval = clip.duration / count
        return _shown_at(video, clip, [clip.start + (index + 0.5) * interval for index in range(count)])
    if clip.fps is not None:
        return _shown_at(video, clip, [clip.start + index / clip.fps for index in range(count)])
    if reading.skipped is not None:
        return islice(video.read_from(clip.start), reading.skipped, reading.skipped + count)
    return _in_a_row(video, clip, count)


def _shown_at(video: VideoSource, clip: Clip, times: list[float]) -> Iterator[VideoFrame]:
    """The frame displayed at each of the times, which must be in order."""
    frames = video.read_from(times[0])
    # `shown` is the frame displayed so far, `following` the next one, read ahead to know when `shown` ends.
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


def _in_a_row(video: VideoSource, clip: Clip, count: int) -> Iterator[VideoFrame]:
    """Consecutive frames from the one displayed at the start of the clip.

    With a variable frame rate fewer than `count` may be left from there. Then the last `count` frames of the file are
    used, which has enough in all.
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
        raise _RetryError(_Reading(video.seeks, skipped=seen - count))
    if video.seeks and clip.start > 0:
        raise _missed()  # frames before the keyframe are needed too
    raise _short(video, clip, last, f"{count} frames")


def _short(video: VideoSource, clip: Clip, last: VideoFrame | None, what: str = "frames") -> UnreadableMediaError:
    end = 0.0 if last is None else video.end(last)
    needed = f"{clip.start:.2f} to {clip.start + clip.duration:.2f} s"
    return UnreadableMediaError(video.path, f"ends after {end:.2f} s, but the clip needs {what} from {needed}")


class _FrameConverter:
    """Converts frames to images. It reuses one converter, because building its HDR tables takes a second."""

    def __init__(self, video: VideoSource, max_pixels: int) -> None:
        self._video, self._max_pixels = video, max_pixels
        self._reformatter = VideoReformatter()
        self._orientation: tuple[Image.Transpose | None] | None = None

    def image(self, frame: VideoFrame) -> Image.Image:
        if frame.is_corrupt:  # FFmpeg has concealed the parts it could not decode
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
        image = Image.fromarray(rgb.to_ndarray())
        if image.size != square:
            image = image.resize(square, Image.Resampling.LANCZOS)
        # Read the orientation once per file: accessing a frame's side data puts the frame into a reference cycle, which
        # keeps its pixels in memory until the next garbage collection.
        self._orientation = self._orientation or (orientation_of(frame),)
        return image if self._orientation[0] is None else image.transpose(self._orientation[0])


def _square(stream: VideoStream, frame: VideoFrame) -> tuple[int, int]:
    """Width and height of a frame with square pixels."""
    shape = stream.sample_aspect_ratio
    return (max(1, round(frame.width * shape)) if shape else frame.width, frame.height)


def _colorspace(frame: VideoFrame) -> Colorspace | None:
    """BT.709 for large files without color information, as video players assume. FFmpeg itself would assume BT.601."""
    large = frame.width >= 1280 or frame.height > 576
    return Colorspace.ITU709 if frame.colorspace == _UNSPECIFIED and large else None


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


def _is_empty(stream: BinaryIO) -> bool:
    return stream.seek(0, 2) == 0
