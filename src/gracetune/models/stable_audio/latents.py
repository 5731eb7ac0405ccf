"""Sounds as Stable Audio denoises them: Oobleck's latents as they are, and when in its file a sound starts and ends.

The seconds are projected here, and not in `predict`: the projection is frozen, its weights are no part of the denoiser,
and two rows are all it makes. So `predict` needs the denoiser alone, and nothing frozen stays on the GPU beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gracetune.cache.encoder import EncoderId
from gracetune.data.errors import DataError
from gracetune.data.media.load import Sample
from gracetune.models.common.encoding import drawn, encoder_id
from gracetune.models.common.vae_encoder import VaeEncoder
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, Placement
from gracetune.models.stable_audio.facts import inspect
from gracetune.models.stable_audio.load import load_projection, load_vae

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry


class StableAudioLatentEncoder(VaeEncoder):
    def __init__(
        self,
        vae: Any,
        projection: Any,
        placement: Placement,
        options: EncodeOptions,
        identity: EncoderId,
    ) -> None:
        super().__init__(vae, identity, options, [projection])
        self._projection = projection
        self._placement = placement

    @torch.no_grad()
    def encode(self, samples: Sequence[Sample]) -> list[Entry]:
        if not samples:
            return []
        sounds = torch.stack([self._sound(sample) for sample in samples])  # [B, channels, samples]
        posterior = self._vae.encode(sounds.to(self._placement.device, self._vae.dtype)).latent_dist
        latents = drawn(posterior, samples, self._options.posterior).to("cpu", self._placement.dtype)
        seconds = torch.tensor([self._seconds(sample, sound) for sample, sound in zip(samples, sounds, strict=True)])
        embeds = self._projected(seconds)
        parts = {"latents": latents, "seconds": seconds, "seconds_embeds": embeds}
        return [{name: part[index].clone() for name, part in parts.items()} for index in range(len(samples))]

    def _projected(self, seconds: Tensor) -> Tensor:
        """[B, 2] -> [B, 2, D]."""
        start, end = seconds.to(self._placement.device).unbind(1)
        found = self._projection(start_seconds=start, end_seconds=end)
        both = torch.cat([found.seconds_start_hidden_states, found.seconds_end_hidden_states], dim=1)
        return both.to("cpu", self._placement.dtype)

    def _sound(self, sample: Sample) -> Tensor:
        if sample.audio is None or sample.ref.clip is None:
            raise DataError(f"{sample.ref.path}: Stable Audio is trained on sound, not on pictures")
        channels, length = sample.audio.shape
        rate, hop = self._vae.config.sampling_rate, self._vae.hop_length
        if (sample.ref.clip.sample_rate, channels) != (rate, self._vae.config.audio_channels) or length % hop:
            found = f"{channels} channels of {length} samples at {sample.ref.clip.sample_rate} Hz"
            wanted = f"{self._vae.config.audio_channels} channels at {rate} Hz, in whole columns of {hop} samples"
            raise DataError(f"{sample.ref.path}: {found}, and these weights take {wanted}")
        return sample.audio

    def _seconds(self, sample: Sample, sound: Tensor) -> tuple[float, float]:
        """Where the sound starts and ends in its file. Silence that was put behind a short one is not part of it."""
        clip = sample.ref.clip
        assert clip is not None
        if not clip.pad:
            return clip.start, clip.start + clip.duration
        heard = sound.ne(0).any(dim=0).nonzero()
        length = int(heard[-1]) + 1 if len(heard) else 0
        return clip.start, clip.start + length / self._vae.config.sampling_rate


def load_latent_encoder(source: ModelSource, placement: Placement, options: EncodeOptions) -> StableAudioLatentEncoder:
    inspect(source)
    settings = {
        "class": "AutoencoderOobleck, StableAudioProjectionModel of the seconds",
        "dtype": str(placement.dtype),
        "posterior": options.posterior,
    }
    identity = encoder_id("latent", source, ["vae", "projection_model"], settings)
    # In bfloat16 the number behind a second near 47 has steps of a quarter of a second.
    projection = load_projection(source, replace(placement, dtype=torch.float32))
    return StableAudioLatentEncoder(load_vae(source, placement), projection, placement, options, identity)
