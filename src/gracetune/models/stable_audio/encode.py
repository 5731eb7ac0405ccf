"""Encoding audio and captions for Stable Audio.

An audio clip is cached as Oobleck's latents and its start and end in seconds. The seconds are projected here instead of
in `predict`: the projection is frozen, not part of the denoiser, and outputs only two rows. `predict` then needs only
the denoiser, and no other frozen module stays on the GPU.

A caption is cached as T5's hidden states of the real tokens, projected; `predict` appends zeros. The empty caption is a
single row of zeros instead of T5's embedding of no text, because the weights were trained with zeros when a caption was
dropped, and the pipeline uses zeros for an empty negative prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gracetune.cache.encoder import EncoderId, Prompt
from gracetune.data.errors import DataError
from gracetune.data.media.load import Sample
from gracetune.models.common.encoding import (
    TruncatedTexts,
    VaeEncoder,
    encoder_id,
    padded_tokens,
    release,
    sample_posterior,
)
from gracetune.models.common.pipelines import load_tokenizer
from gracetune.models.fingerprint import files_digest
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, PartPlacement
from gracetune.models.stable_audio.load import inspect, load_projection, load_t5, load_vae

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry


class StableAudioLatentEncoder(VaeEncoder):
    """Oobleck and the projection of the seconds. Satisfies `cache.encoder.LatentEncoder`."""

    def __init__(
        self,
        vae: Any,
        projection: Any,
        placement: PartPlacement,
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
        waveforms = torch.stack([self._audio(sample) for sample in samples])  # [B, channels, samples]
        posterior = self._vae.encode(waveforms.to(self._placement.device, self._vae.dtype)).latent_dist
        latents = sample_posterior(posterior, samples, self._options.posterior).to("cpu", self._placement.dtype)
        seconds = torch.tensor(
            [self._seconds(sample, waveform) for sample, waveform in zip(samples, waveforms, strict=True)]
        )
        embeds = self._projected(seconds)
        parts = {"latents": latents, "seconds": seconds, "seconds_embeds": embeds}
        return [{name: part[index].clone() for name, part in parts.items()} for index in range(len(samples))]

    def _projected(self, seconds: Tensor) -> Tensor:
        """[B, 2] -> [B, 2, D]."""
        start, end = seconds.to(self._placement.device).unbind(1)
        found = self._projection(start_seconds=start, end_seconds=end)
        both = torch.cat([found.seconds_start_hidden_states, found.seconds_end_hidden_states], dim=1)
        return both.to("cpu", self._placement.dtype)

    def _audio(self, sample: Sample) -> Tensor:
        if sample.audio is None or sample.ref.clip is None:
            raise DataError(f"{sample.ref.path}: found an image or clip, but Stable Audio trains on audio")
        channels, length = sample.audio.shape
        rate, hop = self._vae.config.sampling_rate, self._vae.hop_length
        if (sample.ref.clip.sample_rate, channels) != (rate, self._vae.config.audio_channels) or length % hop:
            found = f"{channels} channels of {length} samples at {sample.ref.clip.sample_rate} Hz"
            wanted = f"{self._vae.config.audio_channels} channels at {rate} Hz, in whole columns of {hop} samples"
            raise DataError(f"{sample.ref.path}: found {found}; these weights need {wanted}")
        return sample.audio

    def _seconds(self, sample: Sample, waveform: Tensor) -> tuple[float, float]:
        """Start and end of the clip in its file, in seconds. With `pad`, samples of exactly 0 at the end count as
        padding, also those of the recording."""
        clip = sample.ref.clip
        assert clip is not None
        if not clip.pad:
            return clip.start, clip.start + clip.duration
        loud = waveform.ne(0).any(dim=0).nonzero()
        length = int(loud[-1]) + 1 if len(loud) else 0
        return clip.start, clip.start + length / self._vae.config.sampling_rate


def load_latent_encoder(
    source: ModelSource, placement: PartPlacement, options: EncodeOptions
) -> StableAudioLatentEncoder:
    inspect(source)
    settings = {
        "class": "AutoencoderOobleck, StableAudioProjectionModel of the seconds",
        "dtype": str(placement.dtype),
        "posterior": options.posterior,
    }
    identity = encoder_id("latent", source, ["vae", "projection_model"], settings)
    # bfloat16 is too coarse here: its steps near 47 seconds are a quarter of a second.
    projection = load_projection(source, replace(placement, dtype=torch.float32))
    return StableAudioLatentEncoder(load_vae(source, placement), projection, placement, options, identity)


class StableAudioTextEncoder:
    """T5 and the projection of its states. Satisfies `cache.encoder.TextEncoder`."""

    reads_images = False

    def __init__(
        self,
        model: nn.Module,
        projection: Any,
        tokenizer: Any,
        tokens: int,
        placement: PartPlacement,
        identity: EncoderId,
    ) -> None:
        self._model = model
        self._projection = projection
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._placement = placement
        self._id = identity
        self._truncated = TruncatedTexts()

    @property
    def id(self) -> EncoderId:
        return self._id

    @property
    def truncated(self) -> Mapping[str, Sequence[str]]:
        return self._truncated.by_limit

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt]) -> list[Entry]:
        if not prompts:
            return []
        texts = [prompt.text for prompt in prompts]
        tokens, long = padded_tokens(self._tokenizer, texts, self._tokens)
        self._truncated.add(f"{self._tokens} tokens", (texts[number] for number in long))
        tokens = tokens.to(self._placement.device)
        states = self._model(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
        states = self._projection(text_hidden_states=states).text_hidden_states.to("cpu", self._placement.dtype)
        lengths = tokens.attention_mask.sum(dim=1).tolist()
        return [
            {"prompt_embeds": _entry(prompt, embeds[:length])}
            for prompt, embeds, length in zip(prompts, states, lengths, strict=True)
        ]

    def close(self) -> None:
        release([self._model, self._projection])


def _entry(prompt: Prompt, embeds: Tensor) -> Tensor:
    """The embedding to cache. The empty caption becomes one row of zeros."""
    return embeds.clone() if prompt.text.strip() else torch.zeros_like(embeds[:1])


def load_text_encoder(source: ModelSource, placement: PartPlacement) -> StableAudioTextEncoder:
    tokens: int = inspect(source).details["text_tokens"]
    settings = {
        "class": "T5EncoderModel, StableAudioProjectionModel",
        "dtype": str(placement.dtype),
        "max length": str(tokens),
        "tokenizer": files_digest(source.part("tokenizer")),
        "empty caption": "zeros",
    }
    identity = encoder_id("text", source, ["text_encoder", "projection_model"], settings)
    return StableAudioTextEncoder(
        load_t5(source, placement),
        load_projection(source, placement),
        load_tokenizer(source),
        tokens,
        placement,
        identity,
    )
