"""Sample references: frozen descriptions of samples that the loader returns instead of pixels.

A `SampleRef` holds everything that decides what a sample looks like. Decoding it twice gives the same tensor, and its
cache key is a pure function of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape shared by all samples of a batch. `frames` is 1 for images; the last two fields are 0 unless audio."""

    width: int = 0
    height: int = 0
    frames: int = 1
    audio_samples: int = 0
    """Per channel, at the clip's `sample_rate`."""
    audio_channels: int = 0


@dataclass(frozen=True)
class Fit:
    """How an image is brought to its bucket: scaled to `resized`, then cropped at (`left`, `top`)."""

    original: tuple[int, int]
    """Width and height as displayed: after EXIF orientation, video rotation and pixel aspect ratio."""
    resized: tuple[int, int]
    left: int = 0
    top: int = 0


@dataclass(frozen=True)
class Clip:
    """A part of a video or audio file, in seconds of the source."""

    start: float
    duration: float
    fps: float | None = None
    """Sample frames at this rate by their timestamps. None takes consecutive frames as they are."""
    spread: bool = False
    """Spread the bucket's frames evenly over the whole duration (`video.whole_clip`). `fps` is then None."""
    sample_rate: int | None = None
    """Resample audio to this rate; None for video."""
    pad: bool = False
    """Pad audio that ends before the clip with silence. False makes that an error."""
    numbers: tuple[int, ...] | None = None
    """The frame numbers to take, counted from 0 in display order (`video.frame_choice: numbers`)."""


@dataclass(frozen=True)
class Transform:
    """A validated entry of a dataset's `transforms`, created by `media.augment.read_transforms`."""

    method: str
    p: float
    options: tuple[tuple[str, tuple[float, float]], ...] = ()
    """Each option's name and range, sorted by name."""


@dataclass(frozen=True)
class AppliedAugmentation:
    flip_x: bool = False
    flip_y: bool = False
    seed: int | None = None
    """The seed of the dataset's `transforms`; None if it has none."""
    epoch: int = 0
    """The variant number: always 0 unless the cache mode is `refresh_each_epoch` or off."""
    transforms: tuple[Transform, ...] = ()
    of: str | None = None
    """The digest that seeds the random values; None means the sample's own. The references of an edit pair have their
    target's, so that all of them are transformed alike."""


@dataclass(frozen=True)
class CaptionRef:
    """The caption after trigger words, shuffling and dropout. A dropped caption has the `dropped_caption` text."""

    text: str
    variant: int = 0
    """Position among the caption variants of the file; 0 if dropped."""
    dropped: bool = False


@dataclass(frozen=True)
class Canny:
    """Thresholds of edge detection: the strength of a gradient from 0 to 1140, which Sobel's operator gives."""

    low: float
    high: float


@dataclass(frozen=True)
class SampleRef:
    """One sample at one visit."""

    dataset: str
    """The dataset's id."""
    path: str
    digest: str
    """xxh3-128 of the file's content, in hexadecimal. Renaming a file does not change it; editing it does."""
    bucket: Bucket
    fit: Fit | None
    """None for audio."""
    caption: CaptionRef
    clip: Clip | None = None
    augmentation: AppliedAugmentation = field(default_factory=AppliedAugmentation)
    conditioning: tuple[SampleRef, ...] = ()
    """Edit sources and references, in the order of the dataset's `conditioning`."""
    mask: MaskRef | None = None
    normalises_mask: bool = False
    """Divide the mask's weights by their mean over the batch."""
    loss_weight: float = 1.0
    canny: Canny | None = None
    """The image's edges take its place, found at the file's own size."""


@dataclass(frozen=True)
class MaskRef:
    """The source of a masked loss's weights. The mask is cropped and flipped like the image."""

    dataset: str
    """The key of the mask's backend in `DataIndex.backends`: a dataset's id or its `masks_id`."""
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
    """The global sample index of each sample. Noise, timestep and dropout are functions of (seed, index)."""
    epoch: int
    """Counted from 0."""
    global_samples: int
    """Samples of this micro-batch over all ranks. The loss of an optimizer step is divided by the sum of these."""
    padding: bool = False
    """True if the micro-batch had fewer samples than there are ranks and this rank got none. `samples` then holds a
    sample of another rank with loss weight 0, so that this rank takes part in the step without effect."""
