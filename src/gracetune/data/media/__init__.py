"""Decoding: what a file shows or sounds like, as tensors. `load` turns one `SampleRef` into one `Sample`."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

Kind = Literal["image", "video", "audio"]

IMAGE_EXTENSIONS = frozenset(
    {"avif", "bmp", "gif", "jpeg", "jpg", "jfif", "jp2", "png", "ppm", "tga", "tif", "tiff", "webp"}
)
VIDEO_EXTENSIONS = frozenset({"avi", "m4v", "mkv", "mov", "mp4", "mpeg", "mpg", "mts", "ts", "webm", "wmv"})
AUDIO_EXTENSIONS = frozenset({"aac", "aif", "aiff", "flac", "m4a", "mp3", "ogg", "opus", "wav", "wma"})

EXTENSIONS: dict[Kind, frozenset[str]] = {
    "image": IMAGE_EXTENSIONS,
    "video": VIDEO_EXTENSIONS,
    "audio": AUDIO_EXTENSIONS,
}


def extension_of(path: str) -> str:
    """Lower case, without the dot."""
    return PurePosixPath(path).suffix[1:].lower()


def kind_of(path: str) -> Kind | None:
    """What a file is by its name; None for captions, sidecars and everything else."""
    extension = extension_of(path)
    return next((kind for kind, names in EXTENSIONS.items() if extension in names), None)
