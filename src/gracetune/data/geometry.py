"""The requirements of a model family on its data. Each family provides one; this folder knows no family by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Geometry:
    makes: Literal["image", "video", "audio"]
    """The medium the model generates."""
    side_multiple: int = 1
    """Width and height are multiples of this, unless a dataset sets `buckets.multiple`."""
    least_multiple: int = 1
    """The smallest multiple the model supports: VAE downsampling factor x patch size."""
    frame_step: int = 1
    """Frame counts are k * frame_step + 1: the VAE encodes the first frame alone, then groups of frame_step."""
    default_frames: int = 1
    """Frames of a clip whose dataset sets no length."""
    default_fps: float | None = None
    """The frame rate the model was trained at, for new configs. A run does not use it."""
    sample_rate: int | None = None
    """Of audio; None keeps each file's own."""
    channels: int | None = None
    """Of audio; None keeps each file's own."""
    audio_multiple: int = 1
    """Audio lengths in samples are multiples of this."""
    max_audio_seconds: float | None = None
    """Longer audio is cut; None means no limit."""
