"""Clip selection: which part of a video or audio file is trained on. Pure functions."""

from __future__ import annotations

import math

from gracetune.config.dataset_config import Audio, Video
from gracetune.data.media.audio import SLACK
from gracetune.data.media.probe import AudioFacts, VideoFacts
from gracetune.data.refs import Clip
from gracetune.seeded_random import below, uniform

_TOLERANCE = 1e-3
"""In seconds. Containers round their times, so a duration may fall short of a whole number of frames by this much."""


def available_frames(facts: VideoFacts, video: Video) -> int:
    """The number of frames of a file at the sampled frame rate."""
    if video.fps is None or video.whole_clip:
        return facts.frames
    if video.frame_choice == "numbers" and video.from_length:
        return max(1, int(facts.frames / _rate(facts) * video.fps))
    if video.frame_choice == "numbers":
        return max(1, facts.frames // _interval(facts, video))
    return max(1, math.ceil((facts.duration - _TOLERANCE) * video.fps))


def clip_count(facts: VideoFacts, video: Video, frames: int) -> int:
    """The number of clips of `frames` frames that fit in a file, for `clip: uniform`; otherwise 1."""
    if video.clip != "uniform" or video.whole_clip:
        return 1
    return max(1, available_frames(facts, video) // frames)


def video_clip(
    facts: VideoFacts, video: Video, frames: int, *, clip_number: int, seed: int, digest: str, variant: int
) -> Clip:
    """The clip to train on. `clip_number` selects one of the clips of `clip: uniform`; `variant` moves a random
    clip."""
    if video.frame_choice == "numbers":
        return _numbered_clip(facts, video, frames, clip_number=clip_number, seed=seed, digest=digest, variant=variant)
    if video.whole_clip:
        return Clip(0.0, facts.duration, spread=True)
    # A single frame is looked up by its time, so it always needs a rate, even where clips take frames as they come.
    rate = facts.fps if video.fps is None and frames == 1 else video.fps
    length = frames / (rate or facts.fps)
    spare = max(0.0, facts.duration - length)
    if video.clip == "random":
        start = spare * uniform(seed, "clip", digest, variant)
    elif video.clip == "uniform":
        count = clip_count(facts, video, frames)
        start = spare / 2 if count == 1 else spare * clip_number / (count - 1)
    else:
        start = 0.0
    return Clip(start, length, rate)


def _numbered_clip(
    facts: VideoFacts, video: Video, frames: int, *, clip_number: int, seed: int, digest: str, variant: int
) -> Clip:
    """A clip given by frame numbers, for `video.frame_choice: numbers`. ai-toolkit selects frames this way."""
    last, interval = facts.frames - 1, _interval(facts, video)
    spare = last - (frames - 1) * interval  # the last frame the clip can start at
    if video.from_length and video.fps is not None:
        step = _rate(facts) / video.fps
        numbers = tuple(min(round(number * step), last) for number in range(frames))
    elif video.whole_clip or available_frames(facts, video) < frames:
        step = last / (frames - 1) if frames > 1 else 0.0
        numbers = tuple(min(round(number * step), last) for number in range(frames))
    else:
        if video.clip == "random":
            start = below(max(0, spare) + 1, seed, "clip", digest, variant)
        elif video.clip == "uniform":
            count = clip_count(facts, video, frames)
            start = spare // 2 if count == 1 else spare * clip_number // (count - 1)
        else:
            start = 0
        numbers = tuple(start + number * interval for number in range(frames))
    return Clip(numbers[0] / facts.fps, (numbers[-1] + 1 - numbers[0]) / facts.fps, numbers=numbers)


def _interval(facts: VideoFacts, video: Video) -> int:
    """The distance in source frames between two sampled frames."""
    return 1 if video.fps is None else max(1, round(_rate(facts) / video.fps))


def _rate(facts: VideoFacts) -> float:
    """Frames per second as in the file's header: 16, not 16.0000001."""
    return round(facts.fps, 6)


def audio_clip(
    facts: AudioFacts, audio: Audio, samples: int, rate: int, *, seed: int, digest: str, variant: int
) -> Clip:
    """The part of an audio file to train on. `variant` moves a random one."""
    length = samples / rate
    spare = max(0.0, facts.duration - length)
    start = {"beginning": 0.0, "end": spare, "random": spare * uniform(seed, "clip", digest, variant)}[audio.truncation]
    return Clip(start, length, sample_rate=rate, pad=is_padded(facts, samples, rate))


def is_padded(facts: AudioFacts, samples: int, rate: int) -> bool:
    """Whether the audio ends before its clip does, by more than a container's rounding."""
    return facts.duration < samples / rate - SLACK
