"""Decoding images, video and audio to tensors. `load` turns a `SampleRef` into a `Sample`."""

from __future__ import annotations

from typing import Literal

from gracetune.data.backends.paths import split_suffix

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


_KINDS: dict[str, Kind] = {extension: kind for kind, names in EXTENSIONS.items() for extension in names}


def extension_of(path: str) -> str:
    """The extension in lower case without the dot; empty for `name`, `.name` and `name.`."""
    return split_suffix(path)[1][1:].lower()


def kind_of(path: str) -> Kind | None:
    """The kind of media by file extension; None for captions, sidecars and all other files."""
    return _KINDS.get(extension_of(path))
