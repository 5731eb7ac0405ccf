"""What a model family declares about its memory, so that a run can be planned without loading the model.

Plain data, filled by `models/<family>/footprint.py`. Sizes are given per token of one sample, so one declaration covers
every resolution, clip length and batch size. `planning.activations`, `adapters.trainable` and `planning.estimate` turn
the numbers into bytes; docs/estimate.md has the formulas. `geometry_from` derives a family's data requirements from the
same declaration, so that no number is written twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from gracetune.config.families import find_flavour
from gracetune.data.geometry import Geometry

FootprintStream = Literal["image", "text", "joint", "vision", "sample"]
"""A sequence of tokens: the latents ("image"), the caption ("text"), both ("joint"), or an image encoder's output
("vision"). "sample" has one row per item."""
Tokens = Mapping[FootprintStream, int]
NeededBy = Literal["graph", "weights", "block", "scales", "full"]
UNPARKED_INPUTS = 2
"""How many of the newest block inputs stay on the device when the others are parked in host memory."""
FP8_CAPABILITY = (9, 0)
"""Hopper and later: matrix products with a scale for each row of both operands."""
_SAME_MODEL = 0.05
"""If the number of parameters differs by a larger fraction, a footprint does not describe the weights."""


@dataclass(frozen=True)
class FootprintKept:
    """A tensor of a block, per token of `stream`: saved for the backward pass (`kept`, `enters`) or temporary
    (`working`)."""

    name: str
    """For messages and for `FootprintLinear.reads`."""
    width: int
    """Elements per token."""
    stream: FootprintStream = "image"
    needed_by: NeededBy = "graph"
    """When the tensor is saved. `graph`: always. `weights`: only if a trained matrix reads it. `block`: only if
    something in this block is trained, because no gradient reaches the block otherwise. `scales`: only if a trained
    matrix computes the modulation of this stream (`FootprintLinear.scales`). `full`: only if everything is trained."""
    fp32: bool = False
    """Four bytes per element, whatever precision the run computes in."""
    eager: bool = True
    """Whether eager autograd saves it."""
    compiled: bool = True
    """Whether torch.compile's partitioner saves it too, instead of recomputing it."""
    batches_only: bool = False
    """Whether it is a part of another saved tensor if the batch has one sample."""


@dataclass(frozen=True)
class FootprintLinear:
    """One matrix or convolution of a block that an adapter can be attached to."""

    name: str
    inputs: int
    outputs: int
    reads: str
    """Name of the `FootprintKept` that is its input. "" if the input is shared by all blocks (the caption's
    embedding)."""
    owner: str = ""
    """Class of the module that contains it. LyCORIS presets select by this name."""
    stream: FootprintStream = "image"
    bias: bool = True
    backward: bool = True
    """Whether its input needs a gradient. If not, its weight is not saved for the backward pass."""
    default: bool = True
    """Part of the family's default targets."""
    conv_default: bool = False
    """Part of the default targets if `adapter.conv_rank` is set (`ModelSpec.conv_targets`)."""
    scales: FootprintStream | None = None
    """For a modulation layer: the stream that its outputs shift, scale and gate."""
    kernel: tuple[int, ...] = ()
    """Kernel size of a convolution; empty for a matrix."""
    around: tuple[str, ...] = ()
    """Classes of the modules around `owner`, the innermost first, if they are known."""

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * math.prod(self.kernel)

    @property
    def is_spatial(self) -> bool:
        """Whether it is a convolution over more than one pixel."""
        return math.prod(self.kernel) > 1


@dataclass(frozen=True)
class BudgetShare:
    """A share of a block's activations, its inputs included, that torch.compile's partitioner keeps.

    Not an exact function of the size: the compiler keeps what takes longest to compute again, and attention's time
    grows with the square of the tokens.
    """

    image: int
    """Image tokens of the traced sample."""
    budget: float
    """torch.compile's `activation_memory_budget`."""
    share: float


@dataclass(frozen=True)
class FootprintBlock:
    """A block of the denoiser, repeated `count` times."""

    name: str
    count: int
    kept: tuple[FootprintKept, ...]
    enters: tuple[FootprintKept, ...]
    """The block's inputs: under gradient checkpointing nothing else is saved."""
    working: tuple[FootprintKept, ...]
    """Gradients and temporaries alive at the peak of its backward pass, in addition to the saved tensors."""
    linears: tuple[FootprintLinear, ...] = ()
    tokens: Fraction = Fraction(1)
    """Tokens of this block per image token of the model. Below 1 for the lower levels of a U-Net."""
    budgets: tuple[BudgetShare, ...] = ()
    """What the compiler keeps under a budget, at one or more sizes. Empty if it was not traced; then a budget's nominal
    share counts."""

    def share_under(self, budget: float, image: int) -> float | None:
        """The share of this block's activations that the compiler keeps for samples of this many image tokens.

        That of the nearest traced size by ratio: the compiler keeps whole tensors, so shares change in steps. None if
        it was not traced.
        """
        sizes = [one for one in self.budgets if one.budget == budget]
        nearest = min(sizes, key=lambda one: abs(math.log(one.image / max(1, image))), default=None)
        return None if nearest is None else nearest.share


@dataclass(frozen=True)
class SampleShape:
    """The size of one sample as the data pipeline delivers it."""

    width: int = 0
    height: int = 0
    frames: int = 1
    seconds: float = 0.0

    @property
    def pixels(self) -> int:
        return self.width * self.height


@dataclass(frozen=True)
class PixelLatents:
    """Latents of an image or video VAE: 1 + (frames - 1) / `temporal` frames of (side / `spatial`) squared pixels."""

    channels: int
    spatial: int = 8
    temporal: int = 1
    patch: int = 2
    """Latent pixels per side of one token; 1 for a U-Net."""
    condition_channels: int = 0
    """Additional channels cached with each sample (first frame and mask of image-to-video models)."""
    default_frames: int = 1

    def planes(self, shape: SampleShape) -> int:
        """Number of latent frames."""
        return 1 + (shape.frames - 1) // self.temporal

    def area(self, shape: SampleShape) -> int:
        """Latent pixels per frame."""
        return math.ceil(shape.width / self.spatial) * math.ceil(shape.height / self.spatial)

    def elements(self, shape: SampleShape) -> int:
        return (self.channels + self.condition_channels) * self.planes(shape) * self.area(shape)

    def tokens(self, shape: SampleShape) -> int:
        cell = self.spatial * self.patch
        return self.planes(shape) * math.ceil(shape.width / cell) * math.ceil(shape.height / cell)


@dataclass(frozen=True)
class AudioLatents:
    """Latents of an audio VAE: one column per `hop` audio samples."""

    channels: int
    hop: int
    sample_rate: int
    longest_seconds: float
    prefix_tokens: int = 0
    """Tokens the denoiser puts in front of the columns."""

    def columns(self, shape: SampleShape) -> int:
        """Length of the latents."""
        return math.ceil(min(shape.seconds, self.longest_seconds) * self.sample_rate / self.hop)

    def elements(self, shape: SampleShape) -> int:
        return self.channels * self.columns(shape)

    def tokens(self, shape: SampleShape) -> int:
        return self.columns(shape) + self.prefix_tokens


@dataclass(frozen=True)
class FootprintCodec:
    """The VAE: its size, and the elements alive at the peak of a pass, per pixel of one frame (per audio sample).

    A video VAE processes a few frames at a time and caches the previous ones. Beyond the first frame, its memory grows
    only with its input or output; `encode_video` and `decode_video` are the values for more than one frame.
    """

    name: str
    parameters: int
    encode: float
    decode: float
    encode_video: float = 0.0
    decode_video: float = 0.0
    element_bytes: int = 2
    """4 for weights that have to run in fp32."""


@dataclass(frozen=True)
class FootprintEncoder:
    """A text or image encoder. `working` is the bytes alive per token, in addition to its weights."""

    name: str
    parameters: int
    working: int
    tokens: int
    """The most tokens that it reads for one caption or image."""
    kind: Literal["text", "vision"] = "text"
    sees_references: bool = False
    """Whether the text encoder also reads the sample's reference images."""
    works_while_sampling: bool = True
    """Whether validation keeps it in memory. False for families that generate samples from cached embeddings."""


@dataclass(frozen=True)
class FootprintText:
    """The caption: tokens the denoiser reads, and elements the text cache stores."""

    tokens: int
    cached_elements: int


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory footprint of one flavour of a family.

    A family may leave out `parameters`, `width` and `blocks`: the planner then traces its denoiser
    (`planning.tracing.store`).
    """

    family: str
    flavour: str
    denoisers: tuple[str, ...]
    """One name, or two for a model with a high-noise and a low-noise expert, in this order."""
    parameters: int = 0
    """Parameters of each denoiser."""
    width: int = 0
    """Channels of the residual; for a U-Net, at its top level."""
    blocks: tuple[FootprintBlock, ...] = ()
    latents: PixelLatents | AudioLatents
    codec: FootprintCodec
    encoders: tuple[FootprintEncoder, ...]
    text: FootprintText
    vision_tokens: int = 0
    """Tokens of the image encoder that the denoiser reads; 0 without one."""
    references: bool = False
    """Edit models: the latents of reference images join the image tokens."""
    measured: str = ""
    """The hardware on which these numbers were compared with measurements; empty if they were not."""

    def mismatch(self, parameters: int) -> str | None:
        """Why this footprint does not describe weights with `parameters` in each denoiser; None if it does."""
        if abs(parameters - self.parameters) <= _SAME_MODEL * self.parameters:
            return None
        return (
            f"the memory plan is for {self.flavour} with {self.parameters:,} parameters; "
            f"these weights have {parameters:,}, so it is not followed"
        )

    @property
    def block_weights(self) -> int:
        """Weights in the blocks' matrices. The layers next to convolutions are small and count with the rest."""
        matrices = (
            (block.count, linear) for block in self.blocks for linear in block.linears if not linear.conv_default
        )
        return sum(count * linear.weights for count, linear in matrices)

    @property
    def linear_weights(self) -> int:
        """Weights of the family's default targets, its large matrices. fp8 and int8 apply to these."""
        return sum(count * linear.weights for count, linear in self._matrices())

    @property
    def linear_rows_and_columns(self) -> int:
        """Rows and columns of the same matrices. fp8 has one scale for each."""
        return sum(count * (linear.inputs + linear.outputs) for count, linear in self._matrices())

    @property
    def linear_rows(self) -> int:
        """Rows of the same matrices. int8 has one scale for each."""
        return sum(count * linear.outputs for count, linear in self._matrices())

    @property
    def largest_matrix(self) -> int:
        """Weights of the largest matrix."""
        return max((linear.weights for _, linear in self._matrices()), default=0)

    def _matrices(self) -> Iterator[tuple[int, FootprintLinear]]:
        """The default targets, each with the number of its blocks."""
        for block in self.blocks:
            yield from ((block.count, linear) for linear in block.linears if linear.default)

    def token_counts(self, shape: SampleShape, references: tuple[SampleShape, ...] = ()) -> dict[FootprintStream, int]:
        """Tokens of each stream for one sample of this shape with these references."""
        image = self.latents.tokens(shape)
        if self.references:
            image += sum(self.latents.tokens(reference) for reference in references)
        return {
            "image": image,
            "text": self.text.tokens,
            "joint": image + self.text.tokens,
            "vision": self.vision_tokens,
        }


# -- data requirements -------------------------------------------------------------------------------------------------


def geometry_from(
    footprint: Footprint, *, halved: int = 1, fps: float | None = None, channels: int | None = None
) -> Geometry:
    """What the data pipeline must deliver for a footprint's latents.

    `halved` is the factor by which a U-Net downsamples its latents, `fps` the frame rate of the weights, `channels` the
    number of audio channels.
    """
    flavour = find_flavour(footprint.family, footprint.flavour)
    if flavour is None:
        raise ValueError(f"{footprint.family} has no flavour {footprint.flavour}")
    latents = footprint.latents
    if isinstance(latents, AudioLatents):
        return Geometry(
            makes=flavour.makes,
            sample_rate=latents.sample_rate,
            channels=channels,
            audio_multiple=latents.hop,
            max_audio_seconds=latents.longest_seconds,
        )
    return Geometry(
        makes=flavour.makes,
        side_multiple=latents.spatial * latents.patch * halved,
        least_multiple=latents.spatial * latents.patch,
        frame_step=latents.temporal,
        default_frames=latents.default_frames,
        default_fps=fps,
    )
