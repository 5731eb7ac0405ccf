"""Findings from the losses of images: likely mislabelled or memorised images, duplicates, and too small images.

Everything here is a pure function of measured values. `judging` measures them.

An image is compared with the other images of the run, by the distance from the median in robust standard deviations
(1.4826 times the median absolute deviation). A dataset in which all images behave alike has no findings.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

DataFindingKind = Literal["mislabelled", "memorised", "duplicate", "too small"]
TITLES: dict[DataFindingKind, str] = {
    "mislabelled": "Likely mislabelled",
    "memorised": "Likely memorised",
    "duplicate": "Duplicates",
    "too small": "Too small",
}
MIN_DISTANCE = 3.0
"""Distance from the median, in robust standard deviations, from which an image is reported."""
MIN_IMAGES = 8
"""With fewer images there is no usual behaviour to compare with."""
MIN_SIMILARITY = 0.95
"""Cosine similarity of two images' reduced latents from which they are reported as duplicates."""
MIN_ENLARGEMENT = 1.2
"""Factor of enlargement from which an image is reported as too small."""


@dataclass(frozen=True)
class JudgedSample:
    """The losses of one image at fixed noise and noise levels, each a mean over the levels and the experts."""

    dataset: str
    path: str
    digest: str
    caption: str
    first: float
    """With the weights that the run began with."""
    last: float
    """With those of the last checkpoint."""
    other_caption: float | None = None
    """With those of the last checkpoint, and the caption of another image. None if there is no other caption."""
    enlarged: float | None = None
    """Factor by which it was scaled up; below 1, it was scaled down. None for audio."""

    @property
    def improvement(self) -> float:
        """The share of the loss that training removed."""
        return (self.first - self.last) / self.first if self.first else 0.0

    @property
    def caption_gain(self) -> float | None:
        """Relative increase of the loss with another image's caption; negative if that caption fits better."""
        return None if self.other_caption is None or not self.last else (self.other_caption - self.last) / self.last


@dataclass(frozen=True)
class DataFinding:
    kind: DataFindingKind
    samples: tuple[int, ...]
    """Indices of the images: one, or all of a group of duplicates."""
    reason: str
    severity: float
    """Sorts findings of one kind; kinds cannot be compared by it."""


@dataclass(frozen=True)
class Judgement:
    step: int
    """The step of the last checkpoint."""
    samples: tuple[JudgedSample, ...]
    findings: tuple[DataFinding, ...]
    """By kind, the most severe first."""
    held_out: tuple[float, float] | None
    """Mean loss of held-out images, before and after; None if the run has none."""
    notes: tuple[str, ...]

    @property
    def mean(self) -> tuple[float, float]:
        """Mean loss of the images, before and after."""
        return statistics.fmean(one.first for one in self.samples), statistics.fmean(one.last for one in self.samples)


def find_all(samples: Sequence[JudgedSample], looks: Sequence[Tensor]) -> tuple[DataFinding, ...]:
    """All findings. `looks` has one unit vector per image; their dot product is the cosine similarity of two images."""
    found = [*_mislabelled(samples), *_memorised(samples), *_duplicates(samples, looks), *_too_small(samples)]
    order = [*TITLES]
    return tuple(sorted(found, key=lambda one: (order.index(one.kind), -one.severity)))


def robust_distances(values: Sequence[float]) -> list[float]:
    """The distance of each value from the median, in robust standard deviations. All 0 if there are too few values, or
    if at least half of them are equal."""
    middle = statistics.median(values) if values else 0.0
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values) if values else 0.0
    if len(values) < MIN_IMAGES or spread == 0:
        return [0.0] * len(values)
    return [(value - middle) / spread for value in values]


def _mislabelled(samples: Sequence[JudgedSample]) -> Iterator[DataFinding]:
    """Images with a lower loss under another caption, images with a high loss whose caption helps little, and images
    that were learned far less than the others.

    A high loss alone is not reported: a detailed image has one too, but its caption lowers it as usual.
    """
    gains = {number: one.caption_gain for number, one in enumerate(samples) if one.caption_gain is not None}
    reported = set()
    for (number, gain), distance in zip(gains.items(), robust_distances([*gains.values()]), strict=True):
        if gain < 0 and distance < -MIN_DISTANCE:
            reported.add(number)
            reason = f"its loss is {-gain:.1%} lower with the caption of another image"
            yield DataFinding("mislabelled", (number,), reason, -distance)
    for number, distance in enumerate(robust_distances([one.last for one in samples])):
        helped = gains.get(number)
        if (
            distance > MIN_DISTANCE
            and helped is not None
            and number not in reported
            and helped <= _lower_quartile(gains.values())
        ):
            reported.add(number)
            times = samples[number].last / statistics.median(one.last for one in samples)
            usual = statistics.median(gains.values())
            reason = f"its loss is {times:.1f} times a usual image's, and with another caption only {helped:.0%} higher"
            yield DataFinding("mislabelled", (number,), f"{reason} (usually {usual:.0%})", distance)
    improvements = [one.improvement for one in samples]
    for number, distance in enumerate(robust_distances(improvements)):
        if distance < -MIN_DISTANCE and number not in reported:
            usual = statistics.median(improvements)
            own, others = -improvements[number], -usual
            reason = f"training changed its loss by {own:+.1%}, and a usual image's by {others:+.1%}"
            yield DataFinding("mislabelled", (number,), reason, -distance)


def _lower_quartile(gains: Collection[float]) -> float:
    """The lower quartile of the captions' gains."""
    return sorted(gains)[(len(gains) - 1) // 4]


def _memorised(samples: Sequence[JudgedSample]) -> Iterator[DataFinding]:
    improvements = [one.improvement for one in samples]
    for number, distance in enumerate(robust_distances(improvements)):
        if distance > MIN_DISTANCE and improvements[number] > 0:
            usual = statistics.median(improvements)
            reason = f"training removed {improvements[number]:.1%} of its loss, and {usual:.1%} of a usual image's"
            yield DataFinding("memorised", (number,), reason, distance)


def _duplicates(samples: Sequence[JudgedSample], looks: Sequence[Tensor]) -> Iterator[DataFinding]:
    """Groups of images with the same content, or with nearly the same look."""
    groups: dict[int, set[int]] = {}
    for first, second in _alike(looks):
        joined = groups.get(first, {first}) | groups.get(second, {second})
        groups.update(dict.fromkeys(joined, joined))
    for group in {id(one): one for one in groups.values()}.values():
        numbers = tuple(sorted(group))
        same = len({samples[number].digest for number in numbers}) == 1
        what = "the same file" if same else "nearly the same image"
        captions = len({samples[number].caption for number in numbers})
        reason = f"{len(numbers)} times {what}" + (f", with {captions} different captions" if captions > 1 else "")
        yield DataFinding("duplicate", numbers, reason, len(numbers))


def _alike(looks: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Pairs of images that look alike. The same file gives the same vector."""
    if not looks:
        return []
    stacked = torch.stack([*looks])
    first, second = torch.nonzero(torch.triu(stacked @ stacked.T >= MIN_SIMILARITY, diagonal=1), as_tuple=True)
    return [*zip(first.tolist(), second.tolist(), strict=True)]


def _too_small(samples: Sequence[JudgedSample]) -> Iterator[DataFinding]:
    for number, one in enumerate(samples):
        if one.enlarged is not None and one.enlarged >= MIN_ENLARGEMENT:
            yield DataFinding("too small", (number,), f"scaled up {one.enlarged:.1f} times", one.enlarged)
