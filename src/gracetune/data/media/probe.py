"""What a file is, without decoding it whole: enough to find its bucket.

Of pictures and sound, the header. The frames of a video are counted by walking through its packets, which reads the
file but decodes nothing: headers leave the number out (mkv, webm, ts), get it wrong (avi), or get the duration wrong
(mp4 of a variable rate). What was cut off is recognised where the format says how long it is; other damage behind the
beginning is found only by decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from gracetune.data.backend import Backend
from gracetune.data.backends.stream import stream_over
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.media.audio import opened_sound
from gracetune.data.media.cut_off import refuse_cut_off
from gracetune.data.media.image import MAX_PIXELS, Bytes, damage_named, open_header, size_upright, too_large
from gracetune.data.media.video import Video, opened, shown_packets, size_shown


@dataclass(frozen=True)
class ImageFacts:
    width: int
    height: int
    """Both after EXIF orientation."""
    has_alpha: bool


@dataclass(frozen=True)
class VideoFacts:
    width: int
    height: int
    """Both upright and with square pixels."""
    frames: int
    duration: float
    """Seconds from the first frame's appearance to the last one's end."""

    @property
    def fps(self) -> float:
        """On average, which is all a variable rate has."""
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
    """The same of a file that is in memory already."""
    with stream_over(memoryview(data)) as stream:
        return _image_facts(stream, path, max_pixels)


def _image_facts(stream: BinaryIO, path: str, max_pixels: int) -> ImageFacts:
    with damage_named(path), open_header(stream, path, max_pixels) as picture:
        width, height = size_upright(picture, stream)
        return ImageFacts(width, height, picture.has_transparency_data)


def probe_video(backend: Backend, path: str, max_pixels: int = MAX_PIXELS) -> VideoFacts:
    with backend.open(path) as stream:
        refuse_cut_off(stream, path)
        with opened(stream, path) as video:
            # One frame is decoded: how it is turned is known to it alone, and a file without any is no video.
            first = next(video.container.decode(video.stream), None)
            if first is None:
                raise UnreadableMediaError(path, "there are no frames in it")
            width, height = size_shown(video.stream, first)
        if width * height > max_pixels:
            raise UnreadableMediaError(path, too_large(f"{width}x{height}", width * height, max_pixels))
        with opened(stream, path) as video:
            return VideoFacts(width, height, *_length(video))


def probe_audio(backend: Backend, path: str) -> AudioFacts:
    with backend.open(path) as stream:
        refuse_cut_off(stream, path)
        with opened_sound(stream, path) as source:
            if source.length < 1:
                raise UnreadableMediaError(path, "there are no samples in it")
            source.check_end()
            return AudioFacts(source.rate, source.channels, source.length)


def _length(video: Video) -> tuple[int, float]:
    """Frames and seconds, from the packets. What headers say is often missing and sometimes wrong."""
    shown = shown_packets(video)
    (first, _), (last, lasting) = shown[0], shown[-1]
    if not lasting:
        rate = video.stream.guessed_rate or video.stream.average_rate
        lasting = round(1 / rate / video.tick) if rate else (last - first) // max(1, len(shown) - 1)
    return len(shown), float(max(1, last + lasting - first) * video.tick)
