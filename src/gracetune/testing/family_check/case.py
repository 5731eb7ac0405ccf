"""The tiny model of one flavour with two generated items, as all checks use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from gracetune.cache.collate import collate
from gracetune.cache.encoder import Entry, LatentEncoder, Prompt, TextEncoder
from gracetune.config.families import find_flavour, flavours
from gracetune.config.family_names import Flavour
from gracetune.config.spelling import nearest
from gracetune.data.geometry import Geometry
from gracetune.data.media.load import Sample, to_pixels
from gracetune.data.refs import Bucket, CaptionRef, Clip, Fit, SampleRef
from gracetune.errors import ConfigError, GracetuneError, Problem
from gracetune.models.footprint import Footprint
from gracetune.models.registry import FOOTPRINTS, geometry, spec_of
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, Expert, ModelFacts, ModelSpec, PartPlacement, SampleRequest
from gracetune.models.tiny import build

CPU = PartPlacement(torch.device("cpu"), torch.float32)
CAPTIONS = ("a red cat", "a blue dog with a much longer story: 猫 and so on")
_MULTIPLE = 16
_REFERENCE = (1024, 1024)
_COLUMNS = 8
"""Latent columns of an audio item."""


class CheckFailedError(GracetuneError):
    """A check failed."""

    def __init__(self, found: str, expected: str, hint: str) -> None:
        self.found, self.expected, self.hint = found, expected, hint
        super().__init__(f"{found}; expected {expected}; {hint}")


def require(holds: bool, found: str, expected: str, hint: str) -> None:
    if not holds:
        raise CheckFailedError(found, expected, hint)


def random_image(size: tuple[int, int], seed: int = 0) -> Image.Image:
    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def sample_of(image: Image.Image, *conditioning: Sample, digest: str = "0123456789abcdef" * 2, **more: Any) -> Sample:
    """An image as `data.media.load` returns it. `more`: fit, augmentation, mask, and frames after the first."""
    frames = [image, *more.pop("frames", ())]
    mask = more.pop("mask", None)
    more.setdefault("fit", Fit(image.size, image.size))
    clip = Clip(0.0, len(frames) / 16, 16.0) if len(frames) > 1 else None
    ref = SampleRef(
        dataset="d",
        path="a.png",
        digest=digest,
        bucket=Bucket(*image.size, len(frames)),
        caption=CaptionRef(""),
        clip=clip,
        conditioning=tuple(sample.ref for sample in conditioning),
        **more,
    )
    pixels = to_pixels(frames)
    return Sample(ref, pixels[:, 0] if clip is None else pixels, None, mask, conditioning)


def sound_of(shape: Geometry, seed: int = 0) -> Sample:
    """Noise with the length of a few latent columns."""
    length, channels = _COLUMNS * shape.audio_multiple, shape.channels or 1
    audio = torch.rand(channels, length, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    rate = shape.sample_rate or 1
    ref = SampleRef(
        dataset="d",
        path=f"{seed}.wav",
        digest=f"{seed:032x}",
        bucket=Bucket(audio_samples=length, audio_channels=channels),
        fit=None,
        caption=CaptionRef(""),
        clip=Clip(0.0, length / rate, sample_rate=rate),
    )
    return Sample(ref, None, audio, None, ())


def batch_of(*entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries collated as the batch source does."""
    return {name: one.build() for name, one in collate(entries, [str(n) for n in range(len(entries))]).items()}


@dataclass(frozen=True)
class FamilyCase:
    """Everything is in float32 on the CPU. Parts are loaded when they are first used."""

    spec: ModelSpec
    flavour: Flavour
    folder: Path
    """The tiny model."""
    work: Path
    """An empty folder for files and runs."""

    @classmethod
    def build(cls, family: str, flavour: str | None, root: Path) -> FamilyCase:
        """Write the tiny model below `root`. ConfigError for an unknown family or flavour."""
        spec, names = spec_of(family), [one.name for one in flavours(family)]
        found = find_flavour(family, flavour or names[0])
        if found is None:
            hint = nearest(flavour or "", names) or names[0]
            raise ConfigError([Problem("--flavour", flavour or "", ", ".join(names), hint)])
        work = root / "work"
        work.mkdir()
        return cls(spec, found, build(family, found.name, root / "model"), work)

    @property
    def family(self) -> str:
        return self.spec.family

    @property
    def source(self) -> ModelSource:
        return ModelSource("tiny", self.folder)

    @cached_property
    def facts(self) -> ModelFacts:
        return self.spec.inspect(self.source)

    @property
    def geometry(self) -> Geometry:
        return geometry(self.family, self.flavour.name)

    @property
    def footprint(self) -> Footprint:
        return next(one for one in FOOTPRINTS[self.family] if one.flavour == self.flavour.name)

    @property
    def untrained(self) -> tuple[str, ...]:
        return (*self.spec.untrained, *self.facts.untrained)

    # -- items ---------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> tuple[int, int]:
        """Width and height. Not square, so that swapping them is detected."""
        multiple = max(_MULTIPLE, self.geometry.side_multiple)
        return 3 * multiple, 2 * multiple

    @property
    def frames(self) -> int:
        return 1 + 2 * self.geometry.frame_step if self.geometry.makes == "video" else 1

    @property
    def seconds(self) -> float:
        rate = self.geometry.sample_rate
        return _COLUMNS * self.geometry.audio_multiple / rate if rate else 0.0

    def reference(self, seed: int) -> Image.Image:
        """The image that an edit starts from, in the size to which pipelines bring every reference."""
        return random_image(_REFERENCE, 100 + seed)

    def item(self, seed: int) -> Sample:
        """An image, a clip or audio; for models that edit with a reference."""
        if self.geometry.makes == "audio":
            return sound_of(self.geometry, seed)
        frames = [random_image(self.size, seed + 1000 * number) for number in range(1, self.frames)]
        references = [sample_of(self.reference(seed))] if self.flavour.edits else []
        return sample_of(random_image(self.size, seed), *references, digest=f"{seed:032x}", frames=frames)

    def request(self, seed: int = 0, **more: Any) -> SampleRequest:
        """A sample of the items' size without guidance. For models that start from an image, that of `item(seed)`."""
        references: tuple[Image.Image, ...] = ()
        if self.flavour.edits:
            references = (self.reference(seed),)
        elif self.flavour.from_image:
            references = (random_image(self.size, seed),)
        sizes: dict[str, Any] = {"seconds": self.seconds}
        if self.geometry.makes != "audio":
            sizes = {"width": self.size[0], "height": self.size[1], "frames": self.frames}
        options: dict[str, Any] = {"steps": 3, "guidance": 1.0, "references": references, **sizes, **more}
        return SampleRequest(options.pop("prompt", CAPTIONS[seed]), **options)

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def encode_options(self) -> EncodeOptions:
        return EncodeOptions(image_to_video=self.flavour.from_image)

    @cached_property
    def latent_encoder(self) -> LatentEncoder:
        return self.spec.load_latent_encoder(self.source, CPU, self.encode_options)

    @cached_property
    def text_encoder(self) -> TextEncoder:
        return self.spec.load_text_encoder(self.source, CPU)

    @cached_property
    def pipeline(self) -> Any:
        """diffusers' own pipeline, all of its parts loaded by diffusers."""
        return self.spec.load_pipeline(self.source, {}, CPU)

    def denoiser(self, expert: Expert | None = None) -> nn.Module:
        """A newly loaded denoiser; of the highest noise if none is named."""
        return self.spec.load_denoiser(self.source, expert or self.facts.experts[0], CPU)

    # -- batches -------------------------------------------------------------------------------------------------------

    def texts(self, *seeds: int) -> list[Entry]:
        """The captions' entries."""
        return self.text_encoder.encode([self._prompt(seed) for seed in seeds])

    def _prompt(self, seed: int) -> Prompt:
        images = self.item(seed).conditioning if self.text_encoder.reads_images else ()
        return Prompt(CAPTIONS[seed], images)

    @cached_property
    def _entries(self) -> dict[int, Entry]:
        return {}

    def entry(self, seed: int) -> Entry:
        """The whole entry of an item: latents, caption and what the family adds."""
        if seed not in self._entries:
            (latents,) = self.latent_encoder.encode([self.item(seed)])
            (text,) = self.texts(seed)
            self._entries[seed] = {**text, **latents}
        return self._entries[seed]

    def batch(self, *seeds: int) -> dict[str, Tensor]:
        """The items of these seeds; of both if none is given."""
        return batch_of(*(self.entry(seed) for seed in seeds or range(len(CAPTIONS))))

    def noisy(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Random noisy latents for a batch, and a noise level for each item within the first expert's range."""
        expert, count = self.facts.experts[0], len(batch["latents"])
        noise = torch.randn(batch["latents"].shape, generator=torch.Generator().manual_seed(1))
        shares = torch.linspace(0.3, 0.8, count)
        return noise, expert.lowest + shares * (expert.highest - expert.lowest)

    def predict(self, denoiser: nn.Module, *seeds: int) -> Tensor:
        """The family's prediction for items, always with the same noise and levels."""
        batch = self.batch(*seeds)
        noisy, level = self.noisy(batch)
        return self.spec.predict(denoiser, noisy, level, batch, self.facts)


Check = Callable[[FamilyCase], str]
"""Returns what was seen, in a few words. Raises `CheckFailedError`."""


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    if one.shape != other.shape:
        return float("inf")
    largest = max(float(other.abs().max()), 1e-12)
    return float((one.float() - other.float()).abs().max()) / largest


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
