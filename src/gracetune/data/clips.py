"""Which piece of a video or sound is trained on. Pure."""

from __future__ import annotations

import math

from gracetune.config.dataset_config import Audio, Video
from gracetune.data.media.audio import SLACK
from gracetune.data.media.probe import AudioFacts, VideoFacts
from gracetune.data.refs import Clip
from gracetune.seeded_random import uniform

_TOLERANCE = 1e-3
"""Seconds: what a container's rounded times may lack of a whole frame."""


def available_frames(facts: VideoFacts, video: Video) -> int:
    """Frames a file has at the rate they are taken."""
    if video.fps is None or video.whole_clip:
        return facts.frames
    return max(1, math.ceil((facts.duration - _TOLERANCE) * video.fps))


def pieces(facts: VideoFacts, video: Video, frames: int) -> int:
    """How many clips of `frames` lie side by side in a file, for `clip: uniform`; else 1."""
    if video.clip != "uniform" or video.whole_clip:
        return 1
    return max(1, available_frames(facts, video) // frames)


def video_clip(
    facts: VideoFacts, video: Video, frames: int, *, piece: int, seed: int, digest: str, variant: int
) -> Clip:
    """`piece` counts through the clips of `clip: uniform`; `variant` moves a random one."""
    if video.whole_clip:
        return Clip(0.0, facts.duration, spread=True)
    # A single frame is the one on screen at its time: there is no row of frames to take as they are.
    rate = facts.fps if video.fps is None and frames == 1 else video.fps
    length = frames / (rate or facts.fps)
    spare = max(0.0, facts.duration - length)
    if video.clip == "random":
        start = spare * uniform(seed, "clip", digest, variant)
    elif video.clip == "uniform":
        count = pieces(facts, video, frames)
        start = spare / 2 if count == 1 else spare * piece / (count - 1)
    else:
        start = 0.0
    return Clip(start, length, rate)


def audio_clip(
    facts: AudioFacts, audio: Audio, samples: int, rate: int, *, seed: int, digest: str, variant: int
) -> Clip:
    length = samples / rate
    spare = max(0.0, facts.duration - length)
    start = {"beginning": 0.0, "end": spare, "random": spare * uniform(seed, "clip", digest, variant)}[audio.truncation]
    return Clip(start, length, sample_rate=rate, pad=is_padded(facts, samples, rate))


def is_padded(facts: AudioFacts, samples: int, rate: int) -> bool:
    """Whether a sound ends before its piece does, by more than the rounding of a container."""
    return facts.duration < samples / rate - SLACK
