"""What the loader hands on: frozen descriptions of samples, never pixels.

A `SampleRef` says everything that decides what a sample looks like, so that decoding it twice gives the same tensor
and a cache key is a pure function of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape all samples of a batch share. `frames` is 1 for images; the last two are 0 for everything but audio."""

    width: int = 0
    height: int = 0
    frames: int = 1
    audio_samples: int = 0
    """Per channel, at the clip's `sample_rate`."""
    audio_channels: int = 0


@dataclass(frozen=True)
class Fit:
    """How a picture is brought to its bucket: scaled to `resized`, then cut at (`left`, `top`)."""

    original: tuple[int, int]
    """Width and height as shown: after EXIF orientation, a video's rotation and its pixel shape."""
    resized: tuple[int, int]
    left: int = 0
    top: int = 0


@dataclass(frozen=True)
class Clip:
    """A piece of a video or of a sound, in seconds of the source."""

    start: float
    duration: float
    fps: float | None = None
    """Frames are taken at this rate, by their timestamps; None takes them one after the other as they are."""
    spread: bool = False
    """`fps` is None and the bucket's frames are spread evenly over the whole duration (`video.whole_clip`)."""
    sample_rate: int | None = None
    """Sound is brought to this rate; None for pictures."""
    pad: bool = False
    """Sound that ends before the clip does is followed by silence; False makes that an error."""
    numbers: tuple[int, ...] | None = None
    """The frames themselves, counted from 0 in the order they are shown (`video.frame_choice: numbers`)."""


@dataclass(frozen=True)
class Transform:
    """One entry of a dataset's `transforms`, checked and complete: made by `media.augment.read_transforms`."""

    method: str
    p: float
    options: tuple[tuple[str, tuple[float, float]], ...] = ()
    """Each option's name and range, sorted by name."""


@dataclass(frozen=True)
class Augmentation:
    flip_x: bool = False
    flip_y: bool = False
    seed: int | None = None
    """Of the dataset's `transforms`; None where there are none."""
    epoch: int = 0
    """The variant: always 0 unless the cache mode is `refresh_each_epoch` or off."""
    transforms: tuple[Transform, ...] = ()
    of: str | None = None
    """The digest the draws belong to; None means the sample's own. The references of an edit pair name their target's,
    so that all of them are turned and tinted alike."""


@dataclass(frozen=True)
class CaptionRef:
    """The caption after trigger words, shuffling and dropout. A dropped caption is empty and says so."""

    text: str
    variant: int = 0
    dropped: bool = False


@dataclass(frozen=True)
class Canny:
    """Thresholds of edge detection: the strength of a gradient from 0 to 1140, which Sobel's operator gives."""

    low: float
    high: float


@dataclass(frozen=True)
class SampleRef:
    dataset: str
    path: str
    digest: str
    """Of the file's content (xxh3-128, hex): renaming a file changes nothing, editing it does."""
    bucket: Bucket
    fit: Fit | None
    """None for audio."""
    caption: CaptionRef
    clip: Clip | None = None
    augmentation: Augmentation = field(default_factory=Augmentation)
    conditioning: tuple[SampleRef, ...] = ()
    """Edit sources and references, in the order of the dataset's `conditioning`."""
    mask: MaskRef | None = None
    normalises_mask: bool = False
    """The mask's weights are divided by their mean over the batch."""
    loss_weight: float = 1.0
    canny: Canny | None = None
    """The image's edges take its place, found at the file's own size."""


@dataclass(frozen=True)
class MaskRef:
    """Where the masked loss' weights come from; cut and flipped as the picture is."""

    dataset: str
    path: str
    digest: str
    from_alpha: bool = False
    min_weight: float = 0.0
    invert: bool = False


@dataclass(frozen=True)
class BatchRef:
    """One micro-batch of one rank."""

    samples: tuple[SampleRef, ...]
    bucket: Bucket
    indexes: tuple[int, ...]
    """The global sample index of each sample: noise, timestep and dropout draws are functions of (seed, index)."""
    epoch: int
    """Counted from 0."""
    global_samples: int
    """Samples of this micro-batch over all ranks: a window's loss is divided by the sum of these."""
    padding: bool = False
    """The micro-batch had fewer samples than there are ranks and this rank got none: `samples` holds one that another
    rank trains on, with loss weight 0, so that this rank takes part in the step without counting."""
