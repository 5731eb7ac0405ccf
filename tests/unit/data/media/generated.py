"""Generated media, and a minimal backend."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, BinaryIO

import av
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

from gracetune.data.backend import FileStat
from gracetune.data.errors import MissingFileError
from gracetune.data.refs import Bucket, Fit

BITS = 8


@dataclass
class DictBackend:
    """A backend over a dictionary."""

    files: dict[str, bytes] = field(default_factory=dict)
    root: str = "memory"

    def list(self) -> Iterable[str]:
        return sorted(self.files)

    def stat(self, path: str) -> FileStat:
        return FileStat(len(self.read(path)), 0)

    def read(self, path: str) -> memoryview:
        if path not in self.files:
            raise MissingFileError(f"{self.root}: no file {path}")
        return memoryview(self.files[path])

    def open(self, path: str) -> BinaryIO:
        return io.BytesIO(self.read(path))

    def exists(self, path: str) -> bool:
        return path in self.files


class CountingStream(io.BytesIO):
    """Counts how much was read."""

    bytes_read = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.bytes_read += len(data)
        return data


def whole(width: int, height: int, frames: int = 1) -> tuple[Fit, Bucket]:
    """A fit without scaling or cropping."""
    return Fit((width, height), (width, height)), Bucket(width, height, frames)


def generated_image(width: int = 24, height: int = 16, seed: int = 0) -> Image.Image:
    """A smooth color image with different corners."""
    y, x = np.mgrid[0:height, 0:width].astype(float)
    red = 255 * x / max(1, width - 1)
    green = 255 * y / max(1, height - 1)
    blue = 127 + 120 * np.sin((x + 2 * y + seed) / 5)
    return Image.fromarray(np.stack([red, green, blue], axis=-1).astype(np.uint8))


def image_bytes(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    """For files Pillow cannot write: 16 bits per channel, or a header that declares more than the file holds."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def numbered(number: int, width: int, height: int) -> NDArray[np.uint8]:
    """A frame with its number in eight black or white stripes, which survive any codec."""
    stripes = [(number >> bit) & 1 for bit in range(BITS)]
    columns = np.repeat(stripes, width // BITS)
    row = np.pad(columns, (0, width - len(columns)), mode="edge")
    return np.broadcast_to(row[None, :, None] * 255, (height, width, 3)).astype(np.uint8)


def number_of(frame: NDArray[Any]) -> int:
    """The number of an [H, W, C] frame, for any range of values."""
    middle = (float(frame.max()) + float(frame.min())) / 2
    stripes = np.array_split(frame.mean(axis=(0, 2)), BITS)
    return sum(int(stripe.mean() > middle) << bit for bit, stripe in enumerate(stripes))


def video_bytes(
    times: Sequence[float],
    *,
    size: tuple[int, int] = (64, 48),
    container: str = "mp4",
    codec: str = "libx264",
    frames: Sequence[NDArray[np.uint8]] | None = None,
    keyframe_every: int = 12,
    rotation: float | None = None,
    mirrored: bool = False,
    pixel_shape: Fraction | None = None,
    options: dict[str, str] | None = None,
    sound: NDArray[np.float32] | None = None,
) -> bytes:
    """A video with frames at the given seconds, by default numbered ones."""
    buffer = io.BytesIO()
    tick = Fraction(1, 1000)
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=25, options={"crf": "10", "sc_threshold": "0", **(options or {})})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.time_base = stream.codec_context.time_base = tick
        stream.gop_size = keyframe_every
        if pixel_shape is not None:
            stream.codec_context.sample_aspect_ratio = pixel_shape
        if rotation is not None:
            stream.set_display_rotation(rotation, hflip=mirrored)
        speaker = None if sound is None else output.add_stream("aac", rate=48_000, layout="stereo")
        for number, time in enumerate(times):
            pixels = numbered(number, *size) if frames is None else frames[number]
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round(time / tick), tick
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
        if speaker is not None and sound is not None:
            heard = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound), format="fltp", layout="stereo")
            heard.sample_rate, heard.pts, heard.time_base = 48_000, 0, Fraction(1, 48_000)
            output.mux(speaker.encode(heard))
            output.mux(speaker.encode())
    return buffer.getvalue()


def every(seconds: float, count: int) -> list[float]:
    return [index * seconds for index in range(count)]


def tone(frequency: float, seconds: float, rate: int, loudness: float = 0.5) -> NDArray[np.float32]:
    """[samples]"""
    return (loudness * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def audio_bytes(sound: NDArray[np.float32], rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """From [samples] or [channels, samples]."""
    buffer = io.BytesIO()
    soundfile.write(buffer, sound.T, rate, format=kind, subtype=subtype)
    return buffer.getvalue()
