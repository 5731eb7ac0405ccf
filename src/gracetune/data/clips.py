"""Which piece of a video or sound is trained on. Pure."""

from __future__ import annotations

import math

from gracetune.config.dataset_config import Audio, Video
from gracetune.data.media.audio import SLACK
from gracetune.data.media.probe import AudioFacts, VideoFacts
from gracetune.data.refs import Clip
from gracetune.seeded_random import below, uniform

_TOLERANCE = 1e-3
"""Seconds: what a container's rounded times may lack of a whole frame."""


def available_frames(facts: VideoFacts, video: Video) -> int:
    """Frames a file has at the rate they are taken."""
    if video.fps is None or video.whole_clip:
        return facts.frames
    if video.frame_choice == "numbers" and video.from_length:
        return max(1, int(facts.frames / _rate(facts) * video.fps))
    if video.frame_choice == "numbers":
        return max(1, facts.frames // _interval(facts, video))
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
    if video.frame_choice == "numbers":
        return _numbered_clip(facts, video, frames, piece=piece, seed=seed, digest=digest, variant=variant)
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


def _numbered_clip(
    facts: VideoFacts, video: Video, frames: int, *, piece: int, seed: int, digest: str, variant: int
) -> Clip:
    last, interval = facts.frames - 1, _interval(facts, video)
    room = last - (frames - 1) * interval
    if video.from_length and video.fps is not None:
        step = _rate(facts) / video.fps
        numbers = tuple(min(round(number * step), last) for number in range(frames))
    elif video.whole_clip or available_frames(facts, video) < frames:
        step = last / (frames - 1) if frames > 1 else 0.0
        numbers = tuple(min(round(number * step), last) for number in range(frames))
    else:
        if video.clip == "random":
            start = below(max(0, room) + 1, seed, "clip", digest, variant)
        elif video.clip == "uniform":
            count = pieces(facts, video, frames)
            start = room // 2 if count == 1 else room * piece // (count - 1)
        else:
            start = 0
        numbers = tuple(start + number * interval for number in range(frames))
    return Clip(numbers[0] / facts.fps, (numbers[-1] + 1 - numbers[0]) / facts.fps, numbers=numbers)


def _interval(facts: VideoFacts, video: Video) -> int:
    """Frames of the file from one that is taken to the next."""
    return 1 if video.fps is None else max(1, round(_rate(facts) / video.fps))


def _rate(facts: VideoFacts) -> float:
    """Frames per second, as a file's header has it: 16, not 16.0000001."""
    return round(facts.fps, 6)


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
