"""What a model family asks of its data. Each family fills one; the data folder knows no family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Geometry:
    makes: Literal["image", "video", "audio"]
    side_multiple: int = 1
    """Width and height are multiples of this, unless a dataset says otherwise (`buckets.multiple`)."""
    least_multiple: int = 1
    """What the model can take at all: VAE factor x patch size."""
    frame_step: int = 1
    """Frame counts are k * frame_step + 1."""
    default_frames: int = 1
    default_fps: float | None = None
    sample_rate: int | None = None
    channels: int | None = None
    audio_multiple: int = 1
    """Audio lengths in samples are multiples of this."""
    max_audio_seconds: float | None = None
