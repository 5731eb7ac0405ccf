"""Z-Image's memory footprint. Dimensions are those of the config files published with each set of weights.

The saved tensors are those of diffusers' `ZImageTransformerBlock`: one stream of image and caption tokens. Before it,
two refiner blocks each see the image alone and the caption alone. All norms are written in plain PyTorch, which saves
fp32 copies in eager mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gracetune.models.common.encoder_footprints import QWEN3_4B
from gracetune.models.footprint import (
    Footprint,
    FootprintBlock,
    FootprintCodec,
    FootprintKept,
    FootprintLinear,
    FootprintStream,
    FootprintText,
    PixelLatents,
)

WIDTH, FFN, HEADS = 3840, 10_240, 30
LAYERS, REFINERS = 30, 2
MODULATION = 256
CAPTION_WIDTH = 2560
CAPTION_TOKENS = 512
PARAMETERS = 6_154_908_736
# `encode` and `decode`: elements alive at the peak of a pass, per pixel. `working`: bytes per token.
VAE = FootprintCodec("VAE (FLUX)", 83_819_683, encode=643, decode=769)


def _norm(name: str, stream: FootprintStream, *, reads: FootprintKept | None) -> Iterator[FootprintKept]:
    """Saved tensors of an RMS norm. `reads`: its input, unless another operation saves it too."""
    if reads is not None:
        yield reads
    yield FootprintKept(f"{name} input in fp32", WIDTH, stream, fp32=True, compiled=False)
    yield FootprintKept(f"{name} before its weight", WIDTH, stream, needed_by="full")


def _kept(stream: FootprintStream, *, modulated: bool) -> Iterator[FootprintKept]:
    def scaled(name: str) -> Iterator[FootprintKept]:
        """The output of a norm that is scaled or gated by the noise level."""
        if modulated:
            yield FootprintKept(name, WIDTH, stream, needed_by="scales")

    yield from _norm("norm1", stream, reads=FootprintKept("residual", WIDTH, stream, compiled=False))
    yield from scaled("norm1 output")
    yield FootprintKept("x1", WIDTH, stream, needed_by="weights")
    yield FootprintKept("query and key before norm", 2 * WIDTH, stream)
    yield FootprintKept("query and key in fp32", 2 * WIDTH, stream, fp32=True, compiled=False)
    yield FootprintKept("query and key before the norm's weight", 2 * WIDTH, stream, needed_by="full")
    yield from (FootprintKept(part, WIDTH, stream) for part in ("query", "key", "value", "attention result"))
    yield FootprintKept("attention statistics", HEADS, stream, fp32=True)
    yield from _norm("norm2", stream, reads=FootprintKept("attention output", WIDTH, stream))
    yield from scaled("norm2 output")
    yield from _norm("norm3", stream, reads=FootprintKept("residual after attention", WIDTH, stream, compiled=False))
    yield from scaled("norm3 output")
    yield FootprintKept("x2", WIDTH, stream, needed_by="weights")
    yield FootprintKept("before SiLU", FFN, stream)
    yield FootprintKept("after SiLU", FFN, stream, compiled=False)
    yield FootprintKept("beside SiLU", FFN, stream)
    yield FootprintKept("product", FFN, stream, needed_by="weights")
    yield from _norm("norm4", stream, reads=FootprintKept("feed-forward output", WIDTH, stream))
    yield from scaled("norm4 output")


def _linears(stream: FootprintStream, *, modulated: bool, default: bool) -> Iterator[FootprintLinear]:
    def linear(name: str, inputs: int, outputs: int, reads: str, owner: str) -> FootprintLinear:
        return FootprintLinear(name, inputs, outputs, reads, owner, stream, bias=False, default=default)

    for part in "qkv":
        yield linear(f"attention.to_{part}", WIDTH, WIDTH, "x1", "Attention")
    yield linear("attention.to_out.0", WIDTH, WIDTH, "attention result", "Attention")
    yield linear("feed_forward.w1", WIDTH, FFN, "x2", "FeedForward")
    yield linear("feed_forward.w3", WIDTH, FFN, "x2", "FeedForward")
    yield linear("feed_forward.w2", FFN, WIDTH, "product", "FeedForward")
    if modulated:
        # The modulation reads the embedding of the noise level, one row per sample.
        owner = "ZImageTransformerBlock"
        yield FootprintLinear(
            "adaLN_modulation.0", MODULATION, 4 * WIDTH, "", owner, "sample", default=False, scales=stream
        )


def _block(
    name: str, count: int, stream: FootprintStream, *, modulated: bool = True, default: bool = False
) -> FootprintBlock:
    return FootprintBlock(
        f"{name}.*",
        count,
        tuple(_kept(stream, modulated=modulated)),
        enters=(FootprintKept("residual", WIDTH, stream),),
        working=(
            FootprintKept("gradients around the feed-forward", 3 * FFN, stream),
            FootprintKept("gradients of the residual", 2 * WIDTH, stream),
        ),
        linears=tuple(_linears(stream, modulated=modulated, default=default)),
    )


def _refiner(name: str, stream: FootprintStream, *, modulated: bool = True) -> FootprintBlock:
    """A block before the trained ones: no gradient reaches it unless it is trained itself."""
    block = _block(name, REFINERS, stream, modulated=modulated)

    def if_trained(kept: tuple[FootprintKept, ...]) -> tuple[FootprintKept, ...]:
        return tuple(replace(one, needed_by="block") if one.needed_by == "graph" else one for one in kept)

    return replace(block, kept=if_trained(block.kept), enters=if_trained(block.enters))


def _z_image(flavour: str) -> Footprint:
    return Footprint(
        family="z_image",
        flavour=flavour,
        denoisers=("transformer",),
        parameters=PARAMETERS,
        width=WIDTH,
        blocks=(
            _refiner("noise_refiner", "image"),
            _refiner("context_refiner", "text", modulated=False),
            _block("layers", LAYERS, "joint", default=True),
        ),
        latents=PixelLatents(16),
        codec=VAE,
        encoders=(QWEN3_4B,),
        text=FootprintText(CAPTION_TOKENS, CAPTION_TOKENS * CAPTION_WIDTH),
    )


FOOTPRINTS = (_z_image("base"), _z_image("turbo"))
