"""What the caches ask of an encoder. A model family fills these; the caches know no family.

An entry is what one encoder makes of one sample: named tensors without a batch dimension. The names:

    latents                  [C, H, W], [C, F, H, W] or [C, L]   what is denoised, scaled as the denoiser wants it
    conditioning_latents_N   as `latents`                        the N-th reference of an edit pair, from 0
    condition                [C, F, H, W]                        image-to-video: first frame, and its mask or alone
    image_embeds             [T, D]                              image-to-video: what an image encoder makes of it
    loss_mask                [1, H, W] or [1, F, H, W]           masked loss, at the latents' own size
    time_ids                 [6]                                 SDXL: original size, crop, target size
    seconds                  [2]                                 sound: where in its file the clip starts and ends
    seconds_embeds           [2, D]                              what the model's frozen projection makes of these
    prompt_embeds            [T, D]                              text; `prompt_attention_mask` [T] where padding matters
    pooled_prompt_embeds     [D]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from gracetune.data.refs import SampleRef

if TYPE_CHECKING:
    from torch import Tensor

    from gracetune.data.media.load import Sample  # brings the decoders

Entry = dict[str, "Tensor"]
PerUse = Callable[[SampleRef], Entry]
"""Tensors that a sample is given at one of its uses, in place of those of the same names that are cached."""


@dataclass(frozen=True)
class EncoderId:
    """Everything about an encoder that decides what it makes of its input: equal ids mean equal entries."""

    kind: Literal["latent", "text"]
    weights: str
    """Fingerprint of all weights that take part."""
    settings: tuple[tuple[str, str], ...]
    """Sorted by name: class, configuration, dtype, scaling, posterior; for text template, lengths, tokenizers."""


@dataclass(frozen=True)
class Prompt:
    """One caption, with the pictures it is about where the embedding depends on them."""

    text: str
    pictures: tuple[Sample, ...] = ()


class LatentEncoder(Protocol):
    @property
    def id(self) -> EncoderId: ...

    def encode(self, samples: Sequence[Sample]) -> list[Entry]:
        """One entry per sample, on the CPU. All samples have the same bucket, and references of the same buckets.

        What a sample's entry holds does not depend on the others of the call.
        """

    def save_memory(self) -> bool:
        """Work in tiles and slices from here on; False where that is already so or the encoder cannot."""

    def close(self) -> None:
        """Give the weights' memory back. Nothing else may be called afterwards."""


@runtime_checkable
class KnowsMore(Protocol):
    """A latent encoder that can tell what its entries hold besides latents and that takes no pixels (`time_ids`)."""

    def beside(self, ref: SampleRef) -> Entry: ...


@runtime_checkable
class CutsTexts(Protocol):
    """A text encoder that knows which texts it read the beginning of only."""

    @property
    def cut(self) -> Mapping[str, Sequence[str]]:
        """What it reads of a text (`77 tokens`) -> the texts that have more, of all that it encoded."""


@runtime_checkable
class MeasuresTexts(Protocol):
    """A text encoder that computes only texts of the same length together."""

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """In tokens. The pass hands it texts of one length at a time, as far as there are any."""


class TextEncoder(Protocol):
    @property
    def id(self) -> EncoderId: ...

    @property
    def reads_pictures(self) -> bool:
        """Whether an embedding depends on the sample's references (edit models), not on the caption alone."""

    def encode(self, prompts: Sequence[Prompt]) -> list[Entry]:
        """One entry per prompt, on the CPU, of its real length: the source of batches pads.

        What an entry holds does not depend on the other prompts of the call; how many they are may change last bits.
        """

    def close(self) -> None: ...
