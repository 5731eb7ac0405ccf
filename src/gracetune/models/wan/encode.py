"""Encoding clips, images and captions for Wan.

B samples, F frames, H x W pixels. Latents have z channels, f = (F - 1) / 4 + 1 frames and h x w pixels. Cache entries
are in the placement's dtype, in which training reads them; the VAE itself works in float32. A caption's entry is UMT5's
last hidden state for the real tokens; `predict` pads it to 512 with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from diffusers.utils.import_utils import is_ftfy_available
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPImageProcessorPil

from gracetune.cache.encoder import EncoderId, Prompt
from gracetune.data.errors import DataError
from gracetune.data.media.load import Sample
from gracetune.errors import ConfigError, Problem
from gracetune.models.common.encoding import (
    TruncatedTexts,
    VaeEncoder,
    encoder_id,
    latent_mask,
    padded_tokens,
    release,
    sample_posterior,
)
from gracetune.models.common.pipelines import load_tokenizer
from gracetune.models.fingerprint import files_digest
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, ModelFacts, PartPlacement
from gracetune.models.wan.load import (
    MASK_CHANNELS,
    TEXT_TOKENS,
    inspect,
    load_image_encoder,
    load_image_processor,
    load_umt5,
    load_vae,
)

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry


@dataclass(frozen=True)
class FirstFrameEncoder:
    """The image encoder of the 2.1 image-to-video weights, which embeds the first frame."""

    model: nn.Module
    processor: CLIPImageProcessorPil

    def embed(self, frames: Tensor, device: torch.device) -> Tensor:
        """Frames [B, 3, H, W] in [-1, 1] -> hidden states before the last layer [B, T, D]."""
        inputs = self.processor(images=[_to_pil(frame) for frame in frames], return_tensors="pt").to(device)
        states: Tensor = self.model(**inputs, output_hidden_states=True).hidden_states[-2]
        return states


class WanLatentEncoder(VaeEncoder):
    """The VAE, and the image encoder if the weights have one. Satisfies `cache.encoder.LatentEncoder`."""

    def __init__(
        self,
        vae: Any,
        first_frame_encoder: FirstFrameEncoder | None,
        facts: ModelFacts,
        placement: PartPlacement,
        options: EncodeOptions,
        identity: EncoderId,
    ) -> None:
        super().__init__(vae, identity, options, [] if first_frame_encoder is None else [first_frame_encoder.model])
        self._first_frame_encoder = first_frame_encoder
        self._facts = facts
        self._placement = placement
        shape = (1, -1, 1, 1, 1)
        self._mean = torch.tensor(vae.config.latents_mean, device=placement.device).view(shape)
        self._scale = 1.0 / torch.tensor(vae.config.latents_std, device=placement.device).view(shape)

    @torch.no_grad()
    def encode(self, samples: Sequence[Sample]) -> list[Entry]:
        if not samples:
            return []
        clips = torch.stack([_clip(sample) for sample in samples]).to(self._placement.device)  # [B, 3, F, H, W]
        latents = self._normalised(
            sample_posterior(self._vae.encode(clips).latent_dist, samples, self._options.posterior)
        )
        parts = {"latents": latents, **self._condition(clips, latents)}
        parts = {name: part.to("cpu", self._placement.dtype) for name, part in parts.items()}
        entries = [{name: part[index].clone() for name, part in parts.items()} for index in range(len(samples))]
        for sample, entry in zip(samples, entries, strict=True):
            entry.update(self._loss_mask(sample, entry))
        return entries

    def _normalised(self, latents: Tensor) -> Tensor:
        return (latents - self._mean) * self._scale

    def _condition(self, clips: Tensor, latents: Tensor) -> dict[str, Tensor]:
        """The conditioning on the first frame, as the weights expect it."""
        if self._facts.details["from_image"]:
            found = {"condition": self._first_frame_and_mask(clips, latents)}
            if self._first_frame_encoder is not None:
                found["image_embeds"] = self._first_frame_encoder.embed(clips[:, :, 0], self._placement.device)
            return found
        if self._options.image_to_video and clips.shape[2] > 1:  # an image has no further frames to predict
            return {"condition": self._normalised(self._vae.encode(clips[:, :, :1]).latent_dist.mean)}
        return {}

    def _first_frame_and_mask(self, clips: Tensor, latents: Tensor) -> Tensor:
        """[B, 4 + z, f, h, w]: a mask that is 1 for given frames, and latents of the first frame followed by grey
        ones."""
        first = torch.zeros_like(clips)
        first[:, :, 0] = clips[:, :, 0]
        mask = torch.zeros_like(latents[:, :1]).repeat(1, MASK_CHANNELS, 1, 1, 1)
        mask[:, :, 0] = 1
        return torch.cat([mask, self._normalised(self._vae.encode(first).latent_dist.mean)], dim=1)

    def _loss_mask(self, sample: Sample, entry: Entry) -> Entry:
        """[1, f, h, w], or nothing if every latent pixel weighs the same.

        A mask is one image for the whole clip. The 5B gets the first frame without noise, so it has no loss there.
        """
        skips_first = "condition" in entry and not self._facts.details["from_image"]
        if not skips_first and sample.mask is None:
            return {}
        weights = torch.ones(1, *entry["latents"].shape[1:])
        if sample.mask is not None:
            weights *= latent_mask(sample.mask, weights.shape[-2:])[:, None]
        if skips_first:
            weights[:, 0] = 0
        return {"loss_mask": weights}


def _clip(sample: Sample) -> Tensor:
    """[3, F, H, W]. An image becomes a clip of one frame."""
    if sample.pixels is None:
        raise DataError(f"{sample.ref.path}: found audio, but Wan trains on images and clips")
    return sample.pixels if sample.pixels.ndim == 4 else sample.pixels[:, None]


def _to_pil(frame: Tensor) -> Image.Image:
    """[3, H, W] in [-1, 1] as the image it was decoded from, bit for bit."""
    return Image.fromarray(((frame + 1) * 127.5).round().to("cpu", torch.uint8).permute(1, 2, 0).contiguous().numpy())


def load_latent_encoder(source: ModelSource, placement: PartPlacement, options: EncodeOptions) -> WanLatentEncoder:
    facts = inspect(source)
    _check(facts, options)
    parts = ["vae"]
    settings = {
        "class": "AutoencoderKLWan, (latents - latents_mean) / latents_std",
        "dtype": "torch.float32",
        "entries": str(placement.dtype),
        "posterior": options.posterior,
        "first frame": _first_frame(facts, options),
    }
    first_frame_encoder = None
    if facts.details["image_encoder"]:
        parts.append("image_encoder")
        settings["image encoder dtype"] = str(placement.dtype)
        settings["image processor"] = f"Pillow, {files_digest(source.part('image_processor'))}"
        first_frame_encoder = FirstFrameEncoder(load_image_encoder(source, placement), load_image_processor(source))
    identity = encoder_id("latent", source, parts, settings)
    return WanLatentEncoder(load_vae(source, placement), first_frame_encoder, facts, placement, options, identity)


def _first_frame(facts: ModelFacts, options: EncodeOptions) -> str:
    """How the first frame of a clip is used, for the encoder's id."""
    if facts.details["from_image"]:
        return "its latents and mask as further channels"
    return "clean" if options.image_to_video else "like the others"


def _check(facts: ModelFacts, options: EncodeOptions) -> None:
    if options.image_to_video and not (facts.details["from_image"] or facts.details["expand_timesteps"]):
        hint = "video.image_to_video: false, or the weights of i2v-14b-2.2 or ti2v-5b-2.2"
        expected = f"false: {facts.flavour} has no image-to-video mode"
        raise ConfigError([Problem("video.image_to_video", "true", expected, hint)])


# Typed aliases: diffusers does not annotate these.
_clean: Callable[[str], str] = prompt_clean
_has_ftfy: Callable[[], bool] = is_ftfy_available


class WanTextEncoder:
    """UMT5. Satisfies `cache.encoder.TextEncoder`."""

    reads_images = False

    def __init__(self, model: nn.Module, tokenizer: Any, placement: PartPlacement, identity: EncoderId) -> None:
        self._model = model
        self._tokenizer = tokenizer
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
        found = embed_captions(self._model, self._tokenizer, texts, self._placement.device, self._truncated)
        return [{"prompt_embeds": embeds.to("cpu", self._placement.dtype, copy=True)} for embeds in found]

    def close(self) -> None:
        release([self._model])


def embed_captions(
    model: nn.Module,
    tokenizer: Any,
    captions: Sequence[str],
    device: torch.device,
    truncated: TruncatedTexts | None = None,
) -> list[Tensor]:
    """Embeddings [tokens, width] of each caption, without padding."""
    tokens, long = padded_tokens(tokenizer, [_clean(caption) for caption in captions], TEXT_TOKENS)
    if truncated is not None:
        truncated.add(f"{TEXT_TOKENS} tokens", (captions[number] for number in long))
    tokens = tokens.to(device)
    states = model(tokens.input_ids, tokens.attention_mask).last_hidden_state
    lengths = tokens.attention_mask.sum(dim=1).tolist()
    return [caption[:length] for caption, length in zip(states, lengths, strict=True)]


def load_text_encoder(source: ModelSource, placement: PartPlacement) -> WanTextEncoder:
    settings = {
        "class": "UMT5EncoderModel, last hidden state",
        "dtype": str(placement.dtype),
        "max length": str(TEXT_TOKENS),
        "tokenizer": files_digest(source.part("tokenizer")),
        # diffusers' prompt cleaning repairs broken characters only if ftfy is installed.
        "cleaned by": f"ftfy {version('ftfy')}" if _has_ftfy() else "html and whitespace",
    }
    identity = encoder_id("text", source, ["text_encoder"], settings)
    return WanTextEncoder(load_umt5(source, placement), load_tokenizer(source), placement, identity)
