"""Probing a file: reads what is needed to find its bucket, without decoding it completely.

For images and audio the header is enough. The frames of a video are counted by reading its packets without decoding,
because headers omit the number (mkv, webm, ts), get it wrong (avi), or get the duration wrong (mp4 with a variable
rate). Truncation is detected if the format stores a length. Other damage after the header is found only by decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from gracetune.data.backend import Backend
from gracetune.data.backends.stream import stream_over
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.media.audio import open_sound
from gracetune.data.media.image import MAX_PIXELS, Bytes, damage_named, open_header, size_upright, too_large
from gracetune.data.media.truncated import reject_cut_off
from gracetune.data.media.video import VideoSource, open_video, shown_packets, size_shown


@dataclass(frozen=True)
class ImageFacts:
    width: int
    height: int
    """Width and height after EXIF orientation."""
    has_alpha: bool


@dataclass(frozen=True)
class VideoFacts:
    width: int
    height: int
    """Width and height upright and with square pixels."""
    frames: int
    duration: float
    """Seconds from the start of the first frame to the end of the last."""

    @property
    def fps(self) -> float:
        """The average frame rate."""
        return self.frames / self.duration


@dataclass(frozen=True)
class AudioFacts:
    sample_rate: int
    channels: int
    samples: int
    """Per channel."""

    @property
    def duration(self) -> float:
        return self.samples / self.sample_rate


def probe_image(backend: Backend, path: str, max_pixels: int = MAX_PIXELS) -> ImageFacts:
    with backend.open(path) as stream:
        return _image_facts(stream, path, max_pixels)


def image_facts(data: Bytes, path: str, max_pixels: int = MAX_PIXELS) -> ImageFacts:
    """The same as `probe_image` for a file in memory."""
    with stream_over(memoryview(data)) as stream:
        return _image_facts(stream, path, max_pixels)


def _image_facts(stream: BinaryIO, path: str, max_pixels: int) -> ImageFacts:
    with damage_named(path), open_header(stream, path, max_pixels) as image:
        width, height = size_upright(image, stream)
        return ImageFacts(width, height, image.has_transparency_data)


def probe_video(backend: Backend, path: str, max_pixels: int = MAX_PIXELS) -> VideoFacts:
    with backend.open(path) as stream:
        reject_cut_off(stream, path)
        with open_video(stream, path) as video:
            # Decode one frame: only the frame holds its rotation, and a video must have at least one.
            first = next(video.container.decode(video.stream), None)
            if first is None:
                raise UnreadableMediaError(path, "it contains no frames")
            width, height = size_shown(video.stream, first)
        if width * height > max_pixels:
            raise UnreadableMediaError(path, too_large(f"{width}x{height}", width * height, max_pixels))
        with open_video(stream, path) as video:
            return VideoFacts(width, height, *_length(video))


def probe_audio(backend: Backend, path: str) -> AudioFacts:
    with backend.open(path) as stream:
        reject_cut_off(stream, path)
        with open_sound(stream, path) as source:
            if source.length < 1:
                raise UnreadableMediaError(path, "it contains no samples")
            source.check_end()
            return AudioFacts(source.rate, source.channels, source.length)


def _length(video: VideoSource) -> tuple[int, float]:
    """Frames and seconds from the packets, because headers are often incomplete and sometimes wrong."""
    shown = shown_packets(video)
    (first, _), (last, last_duration) = shown[0], shown[-1]
    if not last_duration:
        rate = video.stream.guessed_rate or video.stream.average_rate
        last_duration = round(1 / rate / video.tick) if rate else (last - first) // max(1, len(shown) - 1)
    return len(shown), float(max(1, last + last_duration - first) * video.tick)
