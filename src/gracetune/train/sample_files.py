"""Write generated samples as PNG, MP4 or WAV, and a contact sheet of all images. Every file is written atomically."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal

import av
import numpy as np
import soundfile
from PIL import Image

from gracetune.errors import GracetuneError
from gracetune.models.spec import Sampled
from gracetune.storage.atomic import replacing

Kind = Literal["image", "video", "audio"]
DEFAULT_FPS = 16.0
_CELL = 384
"""Longest side of an image on the sheet, in pixels."""


class NotWrittenError(GracetuneError):
    """A sample could not be written. This does not end a run."""


def write_sample(stem: Path, sampled: Sampled, fps: float | None = None) -> tuple[Path, Kind]:
    """Write a sample under `stem` plus the suffix of its kind. `fps` overrides the pipeline's frame rate."""
    if sampled.audio is not None:
        rate = sampled.sample_rate or 44100
        sound = sampled.audio.detach().float().cpu().clamp(-1, 1).numpy().T
        return _written(stem.with_name(stem.name + ".wav"), lambda path: _write_wav(path, sound, rate)), "audio"
    if len(sampled.frames) == 1:
        return _written(stem.with_name(stem.name + ".png"), lambda path: sampled.frames[0].save(path, "PNG")), "image"
    rate_video = fps or sampled.fps or DEFAULT_FPS
    return _written(
        stem.with_name(stem.name + ".mp4"), lambda path: _write_mp4(path, sampled.frames, rate_video)
    ), "video"


def contact_sheet(path: Path, images: Sequence[Image.Image]) -> Path:
    """Write all images as one grid, in the order of the prompts."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    shrunk = [image.copy() for image in images]
    for image in shrunk:
        image.thumbnail((_CELL, _CELL))
    width, height = (max(image.size[side] for image in shrunk) for side in (0, 1))
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    for number, image in enumerate(shrunk):
        row, column = divmod(number, columns)
        sheet.paste(image, (column * width + (width - image.width) // 2, row * height))
    return _written(path, lambda target: sheet.save(target, "PNG"))


def _written(path: Path, write: Callable[[Path], None]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as temporary:
            write(temporary)
    except (OSError, soundfile.LibsndfileError) as error:  # a full disk; soundfile has errors of its own
        raise NotWrittenError(f"{path.name} could not be written: {error}") from error
    return path


def _write_wav(path: Path, sound: np.ndarray, rate: int) -> None:
    soundfile.write(path, sound, rate, format="WAV", subtype="PCM_16")


def _write_mp4(path: Path, frames: Sequence[Image.Image], fps: float) -> None:
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        # yuv420p halves the resolution of colour, so both sides have to be even.
        stream.width, stream.height = (side - side % 2 for side in frames[0].size)
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "18"}
        for image in frames:
            cut = image.convert("RGB").crop((0, 0, stream.width, stream.height))
            frame = av.VideoFrame.from_image(cut)  # type: ignore[no-untyped-call]
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
