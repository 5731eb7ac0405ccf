"""The encoders a config asks for: what the caches are made with. Fills `cache.session.Encoders` for every family."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from gracetune.cache.encoder import EncoderId, LatentEncoder, TextEncoder
from gracetune.cache.places import places_of
from gracetune.cache.tiling import TilingNotes
from gracetune.cache.wanted import validation_texts
from gracetune.config.run_config import RunConfig, Validation
from gracetune.errors import ConfigError, Problem
from gracetune.models import hub
from gracetune.models.hub import Fetch
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource, open_source
from gracetune.models.spec import EncodeOptions, ModelSpec, Placement

if TYPE_CHECKING:
    import torch


@dataclass
class FamilyEncoders:
    """What it is asked first, it remembers: ids take a look at all weights."""

    spec: ModelSpec
    source: ModelSource
    placement: Placement
    options: EncodeOptions
    """Tiles may be added to them: by `tile`, or because an earlier start needed them."""
    notes: TilingNotes
    _remembered: str | None = field(default=None, init=False)
    """Why an earlier start needed tiles, where this one would not have begun with them."""

    def text_id(self) -> EncoderId:
        return self._text_facts[0]

    def reads_pictures(self) -> bool:
        return self._text_facts[1]

    def latent_id(self) -> EncoderId:
        return self._latent_id

    def prompts(self, validation: Validation) -> list[str]:
        how = self.spec.from_embeddings
        return [] if isinstance(how, str) else validation_texts(validation, no_wish=how.no_wish)

    def load_text(self) -> TextEncoder:
        return self.spec.load_text_encoder(self.source, self.placement)

    def load_latents(self) -> LatentEncoder:
        self.latent_id()  # which learns whether an earlier start needed tiles
        return self.spec.load_latent_encoder(self.source, self.placement, self.options)

    def tile(self, why: str) -> None:
        """See `cache.session.Encoders`, also for the two that follow."""
        if not self.options.tiling:
            self.notes.remember(self._id(tiling=False), why)
            self._begin_tiling()

    def tiling_note(self) -> str | None:
        if self._remembered is None:
            return None
        why, file = self._remembered, self.notes.file
        return f"latents are made in tiles, because at an earlier start {why}; `gracetune cache clear` forgets {file}"

    def forget_tiling(self) -> None:
        self.notes.forget(self._id(tiling=False))

    def _begin_tiling(self) -> None:
        self.options = replace(self.options, tiling=True)
        self.__dict__.pop("_latent_id", None)

    @cached_property
    def _text_facts(self) -> tuple[EncoderId, bool]:
        """An encoder on the meta device knows its id, and reads no weight but for their fingerprint."""
        encoder = self.spec.load_text_encoder(self.source, self._nowhere)
        return encoder.id, encoder.reads_pictures

    @cached_property
    def _latent_id(self) -> EncoderId:
        found = self._id(tiling=self.options.tiling)
        if not self.options.tiling:
            self._remembered = self.notes.why(found)
        if self._remembered is None:
            return found
        self._begin_tiling()
        return self._id(tiling=True)

    def _id(self, *, tiling: bool) -> EncoderId:
        return self.spec.load_latent_encoder(self.source, self._nowhere, replace(self.options, tiling=tiling)).id

    @property
    def _nowhere(self) -> Placement:
        import torch

        return replace(self.placement, device=torch.device("meta"))


def encoders_of(
    config: RunConfig, device: torch.device, *, tiling: bool = False, fetch: Fetch = hub.fetch
) -> FamilyEncoders:
    """`tiling` is asked for by a memory plan; the config may ask for it too. `fetch` downloads what a hub id lacks."""
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    placement = Placement(device, dtypes[config.training.mixed_precision])
    base = places_of(config).base
    # Names that nobody else gives to a file of his own: people put caches into folders they already have.
    source = replace(open_source(config.model, fetch), fingerprints=base / "gracetune-fingerprints.json")
    options = encode_options(config, tiling=tiling)
    return FamilyEncoders(spec_of(config.model.family), source, placement, options, TilingNotes(base))


def encode_options(config: RunConfig, *, tiling: bool = False) -> EncodeOptions:
    """The posterior's mean, whatever the family."""
    return EncodeOptions(
        tiling=tiling or config.model.vae_tiling,
        slicing=config.model.vae_slicing,
        image_to_video=_image_to_video(config),
    )


def _image_to_video(config: RunConfig) -> bool:
    """One for the run: latents are made by one encoder. Pictures have no first frame, so they are not asked."""
    said = {
        f"datasets[{dataset.id}].video.image_to_video": dataset.video.image_to_video
        for dataset in config.datasets
        if dataset.dataset_type == "video" and not dataset.disabled
    }
    if len({*said.values()}) > 1:
        found = ", ".join(f"{key.removesuffix('.video.image_to_video')} {str(on).lower()}" for key, on in said.items())
        first = next(key for key, on in said.items() if not on)
        expected = "the same for all clips of a run"
        raise ConfigError([Problem("video.image_to_video", found, expected, f"--set '{first}=true'")])
    return any(said.values())
