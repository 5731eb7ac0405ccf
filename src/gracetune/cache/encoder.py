"""The interface between caches and encoders. Each model family implements it; the caches do not know the families.

An entry is the output of one encoder for one sample: named tensors without a batch dimension. The names:

    latents                  [C, H, W], [C, F, H, W] or [C, L]   what is denoised, scaled as the denoiser expects it
    conditioning_latents_N   as `latents`                        the N-th reference of an edit pair, from 0
    condition                [C, F, H, W]                        image-to-video: first frame, with or without its mask
    image_embeds             [T, D]                              image-to-video: image encoder output for that frame
    loss_mask                [1, H, W] or [1, F, H, W]           weights of a masked loss, at the size of the latents
    time_ids                 [6]                                 SDXL: original size, crop, target size
    seconds                  [2]                                 audio: start and end of the clip in its file
    seconds_embeds           [2, D]                              `seconds` after the model's frozen projection
    prompt_embeds            [T, D]                              text
    prompt_attention_mask    [T]                                 which tokens are text, where padding matters
    pooled_prompt_embeds     [D]                                 pooled text embedding

C channels, F frames, H height, W width, L length, T tokens, D width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from gracetune.data.refs import SampleRef

if TYPE_CHECKING:
    from torch import Tensor

    from gracetune.config.run_config import Validation
    from gracetune.data.media.load import Sample  # at run time this would import the media decoders

Entry = dict[str, "Tensor"]
PerUse = Callable[[SampleRef], Entry]
"""Makes tensors for one use of a sample. They replace cached tensors with the same names."""


@dataclass(frozen=True)
class EncoderId:
    """Everything about an encoder that affects its output. Encoders with equal ids make equal entries."""

    kind: Literal["latent", "text"]
    weights: str
    """Fingerprint of all weights involved."""
    settings: tuple[tuple[str, str], ...]
    """Sorted by name. Latents: class, configuration, dtype, scaling, posterior. Text: template, lengths, tokenizers."""


@dataclass(frozen=True)
class Prompt:
    """One caption, with its reference images if the embedding depends on them."""

    text: str
    images: tuple[Sample, ...] = ()


class LatentEncoder(Protocol):
    """Encodes images, clips and audio (a VAE)."""

    @property
    def id(self) -> EncoderId: ...

    def encode(self, samples: Sequence[Sample]) -> list[Entry]:
        """One entry per sample, on the CPU. All samples have the same bucket, and their references do too.

        The entry of a sample must not depend on the other samples of the call.
        """

    def save_memory(self) -> bool:
        """Use less memory from now on, one step per call: slicing, then tiling. False if there is no further step."""

    def close(self) -> None:
        """Free the memory of the weights. The encoder must not be used afterwards."""


@runtime_checkable
class DescribesEntries(Protocol):
    """A latent encoder that can compute the parts of an entry that need no pixels (`time_ids`)."""

    def beside(self, ref: SampleRef) -> Entry: ...


@runtime_checkable
class ReportsTruncation(Protocol):
    """A text encoder that reports which texts it truncated."""

    @property
    def truncated(self) -> Mapping[str, Sequence[str]]:
        """Truncated texts among all it encoded, by limit (`77 tokens`)."""


@runtime_checkable
class MeasuresTexts(Protocol):
    """A text encoder that runs one batch per text length. The pass sorts texts by length to keep batches full."""

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """The length of each text in tokens."""


class TextEncoder(Protocol):
    """Encodes prompts."""

    @property
    def id(self) -> EncoderId: ...

    @property
    def reads_images(self) -> bool:
        """Whether embeddings also depend on the sample's reference images (edit models)."""

    def encode(self, prompts: Sequence[Prompt]) -> list[Entry]:
        """One entry per prompt, on the CPU, without padding; the batch source pads.

        An entry must not depend on the other prompts of the call, except that the batch size may change rounding.
        """

    def close(self) -> None:
        """Free the memory of the weights. The encoder must not be used afterwards."""


class Encoders(Protocol):
    """The two encoders of a model. `models.encoders` implements them for every family."""

    def text_id(self) -> EncoderId:
        """The id of the text encoder. No weights are loaded by this method and the three that follow."""

    def reads_images(self) -> bool:
        """Whether text embeddings also depend on the sample's reference images."""

    def latent_id(self) -> EncoderId:
        """The id of the latent encoder, with tiling if that was switched on."""

    def prompts(self, validation: Validation) -> list[str]:
        """The texts of validation samples, in the form that this model expects (`required_entries.validation_texts`).

        Empty if the model generates samples from the texts themselves, because then nothing reads their embeddings.
        """

    def load_text(self) -> TextEncoder: ...

    def load_latents(self) -> LatentEncoder: ...

    def tile(self, why: str) -> None:
        """Use tiling from now on, also in later starts. Changes `latent_id`."""

    def tiling_note(self) -> str | None:
        """A note if an earlier start switched tiling on."""

    def forget_tiling(self) -> None:
        """Let the next start try without tiling again, unless the config requires it."""
