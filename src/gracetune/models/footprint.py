"""What a model family declares about itself so that its memory can be planned without loading it.

Plain data, filled by `models/<family>/footprint.py`. Sizes are given for one sample and grow with its tokens, so one
declaration covers every resolution, clip length and batch. How the numbers become bytes:
`planning.activations`, `adapters.trainable`, `planning.estimate`; the formulas are written out in docs/estimate.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Stream = Literal["image", "text", "joint", "vision", "sample"]
"""Which tokens a tensor has a row for: latents, caption, both in one sequence, an image encoder's output, or one for
the whole sample."""
Tokens = Mapping[Stream, int]
NeededBy = Literal["graph", "weights", "block", "scales", "full"]
STAYING = 2
"""Of blocks' inputs that wait in host memory, so many of the newest stay on the device as well."""
FP8_CAPABILITY = (9, 0)
"""From Hopper on: products with a scale for each row of both operands."""


@dataclass(frozen=True)
class Kept:
    """A tensor that one block keeps from its forward pass until its backward pass, per token of `stream`."""

    name: str
    width: int
    stream: Stream = "image"
    needed_by: NeededBy = "graph"
    """`graph`: whatever is trained. `weights`: only if a trained matrix reads it. `block`: only if something in this
    block is trained; no gradient reaches it otherwise. `scales`: only if a trained matrix computes what this stream is
    multiplied by (`Linear.scales`). `full`: only if all is trained."""
    fp32: bool = False
    """Four bytes an element whatever precision the run computes in."""
    eager: bool = True
    compiled: bool = True
    """Whether torch.compile's partitioner keeps it too, instead of computing it again."""


@dataclass(frozen=True)
class Linear:
    """One matrix or convolution of a block that an adapter can sit on."""

    name: str
    inputs: int
    outputs: int
    reads: str
    """Name of the `Kept` that is its input; "" where the input is shared by all blocks (the caption's embedding)."""
    owner: str = ""
    """Class of the module around it, the name LyCORIS presets select by."""
    stream: Stream = "image"
    bias: bool = True
    backward: bool = True
    """Whether its input needs a gradient; without one, its weight is not kept for the backward pass."""
    default: bool = True
    """Part of the family's own choice of targets."""
    conv_default: bool = False
    """Part of it where `adapter.conv_rank` is set (`ModelSpec.conv_targets`)."""
    scales: Stream | None = None
    """The stream that its outputs shift, scale and gate: those of a modulation layer."""
    kernel: tuple[int, ...] = ()
    """Of a convolution; empty for a matrix."""

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * math.prod(self.kernel)

    @property
    def is_spatial(self) -> bool:
        """A convolution that sees more than one pixel."""
        return math.prod(self.kernel) > 1


@dataclass(frozen=True)
class Block:
    """A block of the denoiser, repeated `count` times."""

    name: str
    count: int
    kept: tuple[Kept, ...]
    enters: tuple[Kept, ...]
    """What one block hands to the next: all that is kept of a block whose forward pass will be repeated."""
    working: tuple[Kept, ...]
    """Gradients and scratch alive at the worst moment of its backward pass, beside what is kept."""
    linears: tuple[Linear, ...] = ()
    tokens: Fraction = Fraction(1)
    """Tokens of this block for each image token of the model (levels of a U-Net)."""


@dataclass(frozen=True)
class Shape:
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
    """Latents of an image or video VAE: 1 + (frames - 1) / `temporal` planes of (side / `spatial`) squared."""

    channels: int
    spatial: int = 8
    temporal: int = 1
    patch: int = 2
    """Latent pixels per side of one token; 1 for a U-Net."""
    condition_channels: int = 0
    """Further channels cached with each sample (first frame and mask of image-to-video models)."""
    default_frames: int = 1

    def planes(self, shape: Shape) -> int:
        return 1 + (shape.frames - 1) // self.temporal

    def area(self, shape: Shape) -> int:
        return math.ceil(shape.width / self.spatial) * math.ceil(shape.height / self.spatial)

    def elements(self, shape: Shape) -> int:
        return (self.channels + self.condition_channels) * self.planes(shape) * self.area(shape)

    def tokens(self, shape: Shape) -> int:
        cell = self.spatial * self.patch
        return self.planes(shape) * math.ceil(shape.width / cell) * math.ceil(shape.height / cell)


@dataclass(frozen=True)
class AudioLatents:
    """Latents of an audio VAE: one column per `hop` samples."""

    channels: int
    hop: int
    sample_rate: int
    longest_seconds: float
    prefix_tokens: int = 0

    def columns(self, shape: Shape) -> int:
        return math.ceil(min(shape.seconds, self.longest_seconds) * self.sample_rate / self.hop)

    def elements(self, shape: Shape) -> int:
        return self.channels * self.columns(shape)

    def tokens(self, shape: Shape) -> int:
        return self.columns(shape) + self.prefix_tokens


@dataclass(frozen=True)
class Codec:
    """The VAE: its size, and the elements alive at the worst moment of a pass per pixel of one frame (audio: sample).

    A video VAE works a few frames at a time and remembers the ones before, so beyond the first frame its need grows
    only with the pixels that go in or come out.
    """

    name: str
    parameters: int
    encode: float
    decode: float
    encode_video: float = 0.0
    decode_video: float = 0.0
    element_bytes: int = 2
    """4 where the published weights have to run in fp32."""


@dataclass(frozen=True)
class Encoder:
    """A text or image encoder; `working` is bytes alive per token beside its weights."""

    name: str
    parameters: int
    working: int
    tokens: int
    kind: Literal["text", "vision"] = "text"
    sees_references: bool = False
    """Whether what a text encoder makes of a caption depends on the sample's references."""
    draws: bool = True
    """Whether samples are drawn with it in memory; not, where they are drawn from cached embeddings."""


@dataclass(frozen=True)
class Text:
    """What the denoiser reads of a caption, and what the text cache keeps of it."""

    tokens: int
    cached_elements: int


@dataclass(frozen=True)
class Footprint:
    """One flavour of a family."""

    family: str
    flavour: str
    denoisers: tuple[str, ...]
    """One name, or two for a model with a high-noise and a low-noise expert (in this order)."""
    parameters: int
    """Of each denoiser."""
    width: int
    blocks: tuple[Block, ...]
    latents: PixelLatents | AudioLatents
    codec: Codec
    encoders: tuple[Encoder, ...]
    text: Text
    vision_tokens: int = 0
    references: bool = False
    """Edit models: the latents of reference pictures join the image tokens."""
    measured: str = ""
    """Where this footprint was compared with a GPU's own counters; empty means nowhere yet."""

    @property
    def block_weights(self) -> int:
        """Weights in the blocks' matrices; what stands beside convolutions is small and counts with the rest."""
        matrices = (
            (block.count, linear) for block in self.blocks for linear in block.linears if not linear.conv_default
        )
        return sum(count * linear.weights for count, linear in matrices)

    @property
    def linear_weights(self) -> int:
        """Weights of the family's default targets, its large matrices: what fp8 and int8 apply to."""
        return sum(count * linear.weights for count, linear in self._matrices())

    @property
    def linear_rows(self) -> int:
        """Rows and columns of the same matrices: one scale each in fp8."""
        return sum(count * (linear.inputs + linear.outputs) for count, linear in self._matrices())

    @property
    def linear_outputs(self) -> int:
        """Rows of the same matrices: one scale each in int8."""
        return sum(count * linear.outputs for count, linear in self._matrices())

    @property
    def largest_matrix(self) -> int:
        """Weights of the largest of them."""
        return max((linear.weights for _, linear in self._matrices()), default=0)

    def _matrices(self) -> Iterator[tuple[int, Linear]]:
        """How often each is there."""
        for block in self.blocks:
            yield from ((block.count, linear) for linear in block.linears if linear.default)

    def token_counts(self, shape: Shape, references: tuple[Shape, ...] = ()) -> dict[Stream, int]:
        image = self.latents.tokens(shape)
        if self.references:
            image += sum(self.latents.tokens(reference) for reference in references)
        return {
            "image": image,
            "text": self.text.tokens,
            "joint": image + self.text.tokens,
            "vision": self.vision_tokens,
        }
