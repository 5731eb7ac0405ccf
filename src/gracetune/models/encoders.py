"""The latent and text encoders that fill the caches: `cache.encoder.Encoders` for every family."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from gracetune.cache.encoder import EncoderId, LatentEncoder, TextEncoder
from gracetune.cache.folders import cache_folders
from gracetune.cache.required_entries import validation_texts
from gracetune.config.run_config import RunConfig, Validation
from gracetune.errors import ConfigError, Problem
from gracetune.models import hub_download as hub
from gracetune.models.hub_download import Fetch
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource, open_source
from gracetune.models.spec import EncodeOptions, ModelSpec, PartPlacement
from gracetune.storage.atomic import write_file

if TYPE_CHECKING:
    import torch


@dataclass
class FamilyEncoders:
    """The encoders of one run. Ids are computed once, because each one fingerprints all weights of its encoder."""

    spec: ModelSpec
    source: ModelSource
    placement: PartPlacement
    options: EncodeOptions
    """`tiling` is switched on later by `tile`, or because an earlier run needed it."""
    notes: TilingNotes
    _remembered: str | None = field(default=None, init=False)
    """Why an earlier run needed tiling, if this one would otherwise have started without it."""

    def text_id(self) -> EncoderId:
        return self._text_facts[0]

    def reads_images(self) -> bool:
        return self._text_facts[1]

    def latent_id(self) -> EncoderId:
        return self._latent_id

    def prompts(self, validation: Validation) -> list[str]:
        from_embeddings = self.spec.from_embeddings
        return (
            []
            if isinstance(from_embeddings, str)
            else validation_texts(validation, default_negative=from_embeddings.default_negative)
        )

    def load_text(self) -> TextEncoder:
        return self.spec.load_text_encoder(self.source, self.placement)

    def load_latents(self) -> LatentEncoder:
        self.latent_id()  # switches tiling on if an earlier run needed it
        return self.spec.load_latent_encoder(self.source, self.placement, self.options)

    def tile(self, why: str) -> None:
        """See `cache.encoder.Encoders`, also for `tiling_note` and `forget_tiling`."""
        if not self.options.tiling:
            self.notes.remember(self._id(tiling=False), why)
            self._begin_tiling()

    def tiling_note(self) -> str | None:
        if self._remembered is None:
            return None
        why, file = self._remembered, self.notes.file
        return f"latents are encoded in tiles, because in an earlier run {why}; `gracetune cache clear` resets {file}"

    def forget_tiling(self) -> None:
        self.notes.forget(self._id(tiling=False))

    def _begin_tiling(self) -> None:
        self.options = replace(self.options, tiling=True)
        self.__dict__.pop("_latent_id", None)  # the id covers tiling

    @cached_property
    def _text_facts(self) -> tuple[EncoderId, bool]:
        """An encoder on the meta device has its id. No weight is loaded; they are only read for the fingerprint."""
        encoder = self.spec.load_text_encoder(self.source, self._on_meta)
        return encoder.id, encoder.reads_images

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
        return self.spec.load_latent_encoder(self.source, self._on_meta, replace(self.options, tiling=tiling)).id

    @property
    def _on_meta(self) -> PartPlacement:
        import torch

        return replace(self.placement, device=torch.device("meta"))


def encoders_of(
    config: RunConfig, device: torch.device, *, tiling: bool = False, fetch: Fetch = hub.fetch
) -> FamilyEncoders:
    """The encoders a config needs. The memory plan can request `tiling`, as the config can.

    `fetch` downloads the files of a hub id that are not on this machine.
    """
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    placement = PartPlacement(device, dtypes[config.training.mixed_precision])
    base = cache_folders(config).base
    # A name that no other program uses: people put caches into folders that already hold files.
    source = replace(open_source(config.model, fetch), fingerprints=base / "gracetune-fingerprints.json")
    options = encode_options(config, tiling=tiling)
    return FamilyEncoders(spec_of(config.model.family), source, placement, options, TilingNotes(base))


def encode_options(config: RunConfig, *, tiling: bool = False) -> EncodeOptions:
    """How latents are encoded. Every family uses the posterior's mean."""
    return EncodeOptions(
        tiling=tiling or config.model.vae_tiling,
        slicing=config.model.vae_slicing,
        image_to_video=_image_to_video(config),
    )


def _image_to_video(config: RunConfig) -> bool:
    """One value for the run, because one encoder makes all latents. Image datasets have no first frame and are
    skipped."""
    values = {
        f"datasets[{dataset.id}].video.image_to_video": dataset.video.image_to_video
        for dataset in config.datasets
        if dataset.dataset_type == "video" and not dataset.disabled
    }
    if len({*values.values()}) > 1:
        found = ", ".join(
            f"{key.removesuffix('.video.image_to_video')} {str(on).lower()}" for key, on in values.items()
        )
        first = next(key for key, on in values.items() if not on)
        expected = "the same for all clips of a run"
        raise ConfigError([Problem("video.image_to_video", found, expected, f"--set '{first}=true'")])
    return any(values.values())


# -- encoders that need tiling -----------------------------------------------------------------------------------------


TILING_FILE = "gracetune-tiling.json"
_FORMAT, _VERSION = "gracetune-tiling", 1


class _TilingFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str = _FORMAT
    version: int = _VERSION
    encoders: dict[str, str]


class TilingNotes:
    """A record, beside the caches, of latent encoders that had to use tiling.

    Tiling is part of an encoder's id. A pass that has to switch to tiling makes all latents again under the new id. The
    next start must know that id in advance: to find, audit and clear the entries, and to skip an attempt that would run
    out of memory.

        {"format": "gracetune-tiling", "version": 1, "encoders": {"<BLAKE2b-128 of the untiled id>": "<reason>"}}

    After the file is removed, for example by `gracetune cache clear`, the next build tries without tiles again.

    I/O errors are ignored: the next build then finds out again. A foreign file is left unchanged.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / TILING_FILE

    def why(self, untiled: EncoderId) -> str | None:
        """The reason why this encoder uses tiling, or None if it does not."""
        return self._read().get(_name_of(untiled))

    def remember(self, untiled: EncoderId, why: str) -> None:
        self._write({**self._read(), _name_of(untiled): why})

    def forget(self, untiled: EncoderId) -> None:
        known = self._read()
        if known.pop(_name_of(untiled), None) is not None:
            self._write(known)

    def _read(self) -> dict[str, str]:
        try:
            found = _TilingFile.model_validate_json(self.file.read_bytes())
        except (OSError, ValidationError):
            return {}
        return {**found.encoders} if (found.format, found.version) == (_FORMAT, _VERSION) else {}

    def _write(self, encoders: dict[str, str]) -> None:
        try:
            if self.file.exists() and not self._read():
                return  # not our file: do not overwrite it
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.file, _TilingFile(encoders=encoders).model_dump_json().encode())
        except OSError:
            return


def _name_of(encoder: EncoderId) -> str:
    return blake2b(json.dumps(asdict(encoder), sort_keys=True).encode(), digest_size=16).hexdigest()
