"""The bundle every model family provides. Generic code reads only this and never checks which family it is."""

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
"""`high_noise`, `low_noise`, or `""` for a model with a single denoiser."""


@dataclass(frozen=True)
class Expert:
    """One denoiser and its noise range: from `lowest` up to, and excluding, the next expert's `lowest`."""

    name: ExpertName
    component: str
    """Its folder in the diffusers layout: transformer, transformer_2, unet."""
    lowest: float = 0.0
    highest: float = 1.0


@dataclass(frozen=True)
class ModelFacts:
    """What the configuration files of the weights say. Reading them loads no weights."""

    family: str
    flavour: str
    experts: tuple[Expert, ...]
    """Sorted from the highest noise to the lowest."""
    schedule: NoiseSchedule
    shift: float = 1.0
    """The flow shift the model is sampled with; 1 if it has none."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Values for the family's own functions: sizes, guidance embedding, templates."""
    untrained: tuple[str, ...] = ()
    """Patterns of layers that never get a gradient, if that depends on the number of blocks. Excluded from the default
    targets together with `ModelSpec.untrained`."""


EightBitKind = Literal["fp8", "int8"]
Fp8Layouts = Literal["both", "one"]
"""`both` a row-major and a column-major copy, or `one` that is transposed in every backward pass."""


@dataclass(frozen=True)
class EightBitLayers:
    """The layers whose frozen weights are stored in 8 bits (`models.eight_bit_linear`)."""

    layers: tuple[str, ...]
    """Patterns; `*` matches within one part of a path. `ModelSpec.default_targets` names a family's large matrices."""
    layouts: Fp8Layouts = "both"
    """For fp8; int8 has one layout."""
    kind: EightBitKind = "fp8"


@dataclass(frozen=True)
class PartPlacement:
    """Device, dtype, attention backend and quantization of a part."""

    device: torch.device
    dtype: torch.dtype
    attention: str | None = None
    """diffusers' name of an attention backend, chosen by `models.attention`. None keeps diffusers' default."""
    eight_bits: EightBitLayers | None = None
    """For denoisers: layers stored in 8 bits. Everything else is stored and computed in `dtype`."""


@dataclass(frozen=True)
class EncodeOptions:
    """How latents are encoded."""

    tiling: bool = False
    """The VAE encodes overlapping tiles, which changes the latents slightly."""
    slicing: bool = False
    """The VAE encodes one sample of a batch at a time, with the same result."""
    posterior: str = "mean"
    """`mean`, or `sample`: sampled with a generator seeded by the item's digest, so that it is reproducible."""
    image_to_video: bool = False
    """Train clips from their first frame. Only set for weights that can do both (Wan 2.2 5B)."""


@dataclass(frozen=True)
class SampleRequest:
    """One sample to generate."""

    prompt: str
    negative_prompt: str = ""
    width: int = 0
    """In pixels, like `height`. 0 uses the family's default."""
    height: int = 0
    frames: int = 1
    seconds: float = 0.0
    """Of audio. 0 generates the longest that the weights support."""
    steps: int = 20
    guidance: float | None = None
    """None uses the family's default."""
    guidance_rescale: float = 0.0
    """Only supported by families with `ModelSpec.rescales_guidance`."""
    seed: int = 0
    references: tuple[Image, ...] = ()
    embeds: Mapping[str, Tensor] | None = None
    """The prompt's entry in the text cache, for a pipeline without text encoders (`FromEmbeddings`)."""
    negative_embeds: Mapping[str, Tensor] | None = None
    """The same for the negative prompt."""


@dataclass(frozen=True)
class Sampled:
    """The output of a pipeline: frames (one for an image) or audio [channels, samples], never both."""

    frames: tuple[Image, ...] = ()
    fps: float | None = None
    audio: Tensor | None = None
    sample_rate: int | None = None


@dataclass(frozen=True)
class AttentionCalls:
    """How a family's denoisers call attention, which decides the kernels they can use (`models.attention`)."""

    masked: bool = False
    """Whether they pass a mask, at least for some batches."""
    dispatched: bool = True
    """Whether the calls go through diffusers' dispatcher instead of directly to torch."""
    head_dim: int = 128
    """Head size of the published weights."""


class Predict(Protocol):
    def __call__(
        self, denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
    ) -> Tensor:
        """The denoiser's prediction for `noisy` [B, ...] at `level` [B], shaped like `noisy`.

        `batch` holds the cached entries (named as in `cache.encoder`) with a batch dimension.
        """


class LoadPipeline(Protocol):
    def __call__(
        self,
        source: ModelSource,
        denoisers: Mapping[str, nn.Module],
        placement: PartPlacement,
        facts: ModelFacts | None = None,
    ) -> Any:
        """diffusers' own pipeline around the given denoisers (component -> module). All other parts are loaded.

        It samples with the settings in `facts` (`models.fact_overrides` applies a config's). None uses those of the
        weights.
        """


@dataclass(frozen=True)
class FromEmbeddings:
    """How samples are generated without text encoders, from entries of the text cache that training uses too."""

    load_pipeline: LoadPipeline
    """Like the family's `load_pipeline`, but without text encoders. `sample` then gets requests with embeddings."""
    rejection: Callable[[ModelFacts], str | None] = lambda facts: None
    """Why these weights cannot do that; None if they can."""
    default_negative: str = ""
    """The text whose embedding is the negative prompt if none is given."""


@dataclass(frozen=True)
class BlockRouting:
    """How tokens bypass the blocks that `FamilyNames.routed_blocks` lists (`models.token_routing`)."""

    patch: tuple[int, ...]
    """Latent pixels of one token along each dimension of the latents."""
    select: Callable[[Mapping[str, Any], Tensor], Mapping[str, Any]]
    """Selects the kept tokens [B, kept] from a block's named arguments: every argument with one row per image token,
    other than the image tokens themselves. Returns the changed arguments."""
    output_index: int | None = None
    """Index of the image tokens in the tuple a block returns; None if it returns only them."""
    references: Callable[[Mapping[str, Tensor]], Sequence[Tensor]] = lambda batch: ()
    """Reference latents of a batch. Their tokens follow the image's and are routed like them."""
    always: Callable[[Tensor, Mapping[str, Tensor], ModelFacts], int] = lambda latents, batch, facts: 0
    """Number of leading tokens that are never bypassed: latents that are given instead of predicted."""


@dataclass(frozen=True)
class ModelSpec:
    """One family. The functions keep no state."""

    family: str
    """As in `config.families`."""
    inspect: Callable[[ModelSource], ModelFacts]
    """Recognizes the flavour of a folder and checks that its configuration is supported."""
    load_denoiser: Callable[[ModelSource, Expert, PartPlacement], nn.Module]
    """Loads it frozen and in eval mode, with one copy of the weights. Layers that must stay float32 do."""
    build_denoiser: Callable[[ModelSource, Expert], nn.Module]
    """Builds it on the meta device: shapes and names without memory."""
    load_latent_encoder: Callable[[ModelSource, PartPlacement, EncodeOptions], LatentEncoder]
    load_text_encoder: Callable[[ModelSource, PartPlacement], TextEncoder]
    predict: Predict
    load_pipeline: LoadPipeline
    sample: Callable[[Any, SampleRequest], Sampled]
    keys: KeyMap
    """The names of this family's layers in other files."""
    default_targets: tuple[str, ...]
    """Patterns of the layers an adapter is attached to if the config names none."""
    repeated_blocks: tuple[str, ...]
    """Class names of the denoiser's repeated blocks. These are compiled and checkpointed."""
    build_tiny: Callable[..., Path]
    """(folder, flavour, seed) -> the folder, with a tiny model of the flavour."""
    per_use: Callable[[Model], PerUse | None] = lambda model: None
    """Conditioning that the config's `model` section computes at each use of a sample instead of caching it, or
    None."""
    conv_targets: tuple[str, ...] = ()
    """Patterns of the modules with convolutions, which join the default targets if `adapter.conv_rank` is set. Empty if
    the denoiser's blocks have no convolutions."""
    untrained: Sequence[str] = ()
    """Patterns of layers that never get a gradient, excluded from the default targets."""
    token_multiple: int = 1
    """The denoiser pads an image's tokens and a caption's to multiples of this number."""
    attention: AttentionCalls = AttentionCalls()
    adjust: Callable[[nn.Module], None] | None = None
    """What `load_denoiser` and `build_denoiser` change in the library's model so that it computes the same faster."""
    graph_inputs: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """The tensors of a batch that `predict` reads in a step captured as a CUDA graph, padded to as few shapes as
    possible, because each shape is captured separately. None: the family has not been captured on a GPU yet, so CUDA
    graphs are not used."""
    check_sample: Callable[[SampleRequest, ModelFacts], None] = lambda request, facts: None
    """Raises ConfigError for a request that `sample` would reject, before anything is loaded. The key of a problem is
    the name of the value in `validation.prompts`."""
    token_routing: BlockRouting | None = None
    """For families with `FamilyNames.routed_blocks`."""
    rescales_guidance: bool = False
    """Whether its pipeline supports `guidance_rescale`."""
    from_embeddings: FromEmbeddings | str = "this family generates samples from texts only"
    """How samples are generated without text encoders, or why that is not possible."""
