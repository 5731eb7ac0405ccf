"""What every model family provides, in one bundle. Generic code reads this and never asks which family it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gracetune.cache.encoder import LatentEncoder, PerUse, TextEncoder
from gracetune.config.run_config import Model
from gracetune.diffusion.schedule import NoiseSchedule
from gracetune.models.source import ModelSource

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor, nn

    from gracetune.models.keys import KeyMap

ExpertName = str
"""`high_noise`, `low_noise`, or `""` for a model that has only one denoiser."""


@dataclass(frozen=True)
class Expert:
    """One denoiser and the noise levels it works at: `lowest <= level`, and below the next expert's `lowest`."""

    name: ExpertName
    component: str
    """Its folder in the diffusers layout: transformer, transformer_2, unet."""
    lowest: float = 0.0
    highest: float = 1.0


@dataclass(frozen=True)
class ModelFacts:
    """What the weights' configuration files say: read without loading any weight."""

    family: str
    flavour: str
    experts: tuple[Expert, ...]
    """The one for the highest noise first."""
    schedule: NoiseSchedule
    shift: float = 1.0
    """Of the flow's noise levels, as the model is sampled with; 1 where there is none."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """For the family's own functions: sizes, guidance embedding, templates."""
    untrained: tuple[str, ...] = ()
    """Layers of this very model that never get a gradient, where that depends on how many blocks it has; to be left
    out of the default targets together with `ModelSpec.untrained`."""


EightBitKind = Literal["fp8", "int8"]
Fp8Layouts = Literal["both", "one"]
"""By rows and by columns, or by rows alone and turned in every backward pass."""


@dataclass(frozen=True)
class EightBits:
    """The layers whose frozen weights are held in 8 bits (`models.fp8`, `models.int8`)."""

    layers: tuple[str, ...]
    """Patterns; a `*` stays within one part of a path. `ModelSpec.default_targets` are a family's large matrices."""
    layouts: Fp8Layouts = "both"
    """Of fp8; int8 has one."""
    kind: EightBitKind = "fp8"


@dataclass(frozen=True)
class Placement:
    """Where and how a part is held."""

    device: torch.device
    dtype: torch.dtype
    attention: str | None = None
    """diffusers' name of an attention backend, chosen by `models.attention`; None leaves diffusers' own choice."""
    eight_bits: EightBits | None = None
    """For denoisers: layers held in fewer bits than `dtype`, which everything else is held and computed in."""


@dataclass(frozen=True)
class EncodeOptions:
    tiling: bool = False
    slicing: bool = False
    posterior: str = "mean"
    """`mean`, or `sample`: drawn from a generator seeded by the sample's own digest, so that it can be repeated."""
    image_to_video: bool = False
    """Clips are learnt from their first frame; asked for only where the weights can do both (Wan 2.2 5B)."""


@dataclass(frozen=True)
class SampleRequest:
    prompt: str
    negative_prompt: str = ""
    width: int = 0
    height: int = 0
    frames: int = 1
    seconds: float = 0.0
    steps: int = 20
    guidance: float | None = None
    """None: the family's own default."""
    guidance_rescale: float = 0.0
    """Only for families with `ModelSpec.rescales_guidance`."""
    seed: int = 0
    references: tuple[Image, ...] = ()
    embeds: Mapping[str, Tensor] | None = None
    """The prompt's entry of the text cache. For a pipeline without text encoders (`FromEmbeddings`)."""
    negative_embeds: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Sampled:
    """What a pipeline drew: frames (one for a picture) or sound [channels, samples], never both."""

    frames: tuple[Image, ...] = ()
    fps: float | None = None
    audio: Tensor | None = None
    sample_rate: int | None = None


@dataclass(frozen=True)
class AttentionCalls:
    """How a family's denoisers call attention: what a kernel has to be able to do for them (`models.attention`)."""

    masked: bool = False
    """They give it a mask, in some batches at least."""
    dispatched: bool = True
    """The calls go through diffusers' dispatcher, and not to torch at once."""
    head_dim: int = 128
    """Of the published weights."""


class Predict(Protocol):
    def __call__(
        self, denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
    ) -> Tensor:
        """The denoiser's answer to `noisy` [B, ...] at `level` [B], shaped like `noisy`.

        `batch` holds the cached entries (names of `cache.encoder`) with a batch dimension.
        """


class LoadPipeline(Protocol):
    def __call__(
        self,
        source: ModelSource,
        denoisers: Mapping[str, nn.Module],
        placement: Placement,
        facts: ModelFacts | None = None,
    ) -> Any:
        """diffusers' own pipeline around the given denoisers (component -> module); the rest is loaded.

        It samples as `facts` say (`models.facts` has those of a config); None: as the weights' files do.
        """


@dataclass(frozen=True)
class FromEmbeddings:
    """How samples are drawn without text encoders, from the entries training reads its captions' embeddings from."""

    load_pipeline: LoadPipeline
    """As the family's own, without text encoders: `sample` is then given requests with embeddings."""
    refusal: Callable[[ModelFacts], str | None] = lambda facts: None
    """Why that is not possible with these weights; None where it is."""
    no_wish: str = ""
    """The text whose embedding is guided away from where no negative prompt is given."""


@dataclass(frozen=True)
class BlockRouting:
    """How tokens skip the blocks that `FamilyNames.routed_blocks` lists (`models.token_routing`)."""

    patch: tuple[int, ...]
    """Latent cells of one token along each side of the latents."""
    select: Callable[[Mapping[str, Any], Tensor], Mapping[str, Any]]
    """Of a block's arguments by name: those beside the image tokens that have a row for each of these, with the rows of
    the kept tokens [B, kept]."""
    answer: int | None = None
    """Place of the image tokens in what a block returns; None: they are all of it."""
    references: Callable[[Mapping[str, Tensor]], Sequence[Tensor]] = lambda batch: ()
    """Latents of a batch whose tokens stand behind the image's, and are routed as these are."""
    always: Callable[[Tensor, Mapping[str, Tensor], ModelFacts], int] = lambda latents, batch, facts: 0
    """So many of the first tokens skip nothing: latents that are given, and not predicted."""


@dataclass(frozen=True)
class ModelSpec:
    """One family. The functions are small; none keeps state."""

    family: str
    inspect: Callable[[ModelSource], ModelFacts]
    load_denoiser: Callable[[ModelSource, Expert, Placement], nn.Module]
    """Frozen, in eval mode, one copy of the weights; layers that must stay float32 do."""
    build_denoiser: Callable[[ModelSource, Expert], nn.Module]
    """The same on the meta device: shapes and names without memory."""
    load_latent_encoder: Callable[[ModelSource, Placement, EncodeOptions], LatentEncoder]
    load_text_encoder: Callable[[ModelSource, Placement], TextEncoder]
    predict: Predict
    load_pipeline: LoadPipeline
    sample: Callable[[Any, SampleRequest], Sampled]
    keys: KeyMap
    """What this family's layers are called in other files."""
    default_targets: tuple[str, ...]
    """Patterns of the layers an adapter sits on when a config names none."""
    repeated_blocks: tuple[str, ...]
    """Names of the block classes the denoiser repeats: what is compiled and checkpointed."""
    build_tiny: Callable[..., Path]
    per_use: Callable[[Model], PerUse | None] = lambda model: None
    """What a config's `model` section says a sample is given at each use instead of what is cached; None: nothing."""
    conv_targets: tuple[str, ...] = ()
    """Patterns of the modules with convolutions: they join the default targets where `adapter.conv_rank` is set.
    Empty where the denoiser's blocks have no convolutions."""
    untrained: Sequence[str] = ()
    """Patterns of target layers that never get a gradient, left out of the default targets."""
    attention: AttentionCalls = AttentionCalls()
    adjust: Callable[[nn.Module], None] | None = None
    """What `load_denoiser` and `build_denoiser` do to the library's own model, so that it computes the same faster."""
    recorded_inputs: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """The tensors of a batch that `predict` gets in a step captured as a CUDA graph, in as few shapes as possible: each
    shape is captured separately. None: this family has not been captured on a GPU yet, so CUDA graphs are not used."""
    check_sample: Callable[[SampleRequest, ModelFacts], None] = lambda request, facts: None
    """ConfigError for a request that `sample` would refuse: asked before anything is loaded. A problem's key is what
    the value is called in `validation.prompts`."""
    token_routing: BlockRouting | None = None
    """For families with `FamilyNames.routed_blocks`."""
    rescales_guidance: bool = False
    """Whether its pipeline takes `guidance_rescale`."""
    from_embeddings: FromEmbeddings | str = "this family's samples are drawn from texts"
    """Or why its samples need text encoders."""
