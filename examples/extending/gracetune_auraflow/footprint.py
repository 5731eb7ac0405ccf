"""What AuraFlow needs in memory. Dimensions: the config files published with the weights.

The kept tensors are those of diffusers' `AuraFlowJointTransformerBlock` (two streams that meet in one attention) and
`AuraFlowSingleTransformerBlock` (one stream of both). All norms work in float32.
"""

from __future__ import annotations

from gracetune.extension import (
    Footprint,
    FootprintBlock,
    FootprintCodec,
    FootprintEncoder,
    FootprintKept,
    FootprintLinear,
    FootprintStream,
    FootprintText,
    PixelLatents,
)
from gracetune_auraflow import FAMILY

WIDTH, FFN, HEADS = 3072, 8192, 12
JOINT, SINGLE = 4, 32
CAPTION_TOKENS, REGISTERS = 256, 8
CAPTION_WIDTH = 2048
VAE = FootprintCodec("VAE (SDXL)", 83_653_863, encode=643, decode=769, element_bytes=4)
PILE_T5 = FootprintEncoder("text encoder (Pile-T5-XL)", 1_223_550_976, working=61_568, tokens=CAPTION_TOKENS)


def _stream(stream: FootprintStream, name: str) -> tuple[FootprintKept, ...]:
    """Of one stream outside the attention itself."""
    return (
        FootprintKept(f"{name} norm1 input", WIDTH, stream, fp32=True, compiled=False),
        FootprintKept(f"{name} norm1 output", WIDTH, stream, needed_by="full"),
        FootprintKept(f"{name} x1", WIDTH, stream, needed_by="weights"),
        FootprintKept(f"{name} query and key before norm", 2 * WIDTH, stream, fp32=True),
        FootprintKept(f"{name} attention output", WIDTH, stream, needed_by="full"),
        FootprintKept(f"{name} norm2 input", WIDTH, stream, fp32=True),
        FootprintKept(f"{name} norm2 output", WIDTH, stream, needed_by="full"),
        FootprintKept(f"{name} x2", WIDTH, stream, needed_by="weights"),
        FootprintKept(f"{name} gate before and after SiLU, and what it gates", 3 * FFN, stream),
        FootprintKept(f"{name} gated", FFN, stream, needed_by="weights"),
        FootprintKept(f"{name} feed-forward output", WIDTH, stream, needed_by="full"),
    )


def _attention() -> tuple[FootprintKept, ...]:
    return (
        *(FootprintKept(part, WIDTH, "joint") for part in ("query", "key", "value", "attention result")),
        FootprintKept("attention statistics", HEADS, "joint", fp32=True),
    )


def _feed_forward(path: str, stream: FootprintStream, name: str) -> tuple[FootprintLinear, ...]:
    owner = "AuraFlowFeedForward"
    return (
        FootprintLinear(f"{path}.linear_1", WIDTH, FFN, f"{name} x2", owner, stream, bias=False),
        FootprintLinear(f"{path}.linear_2", WIDTH, FFN, f"{name} x2", owner, stream, bias=False),
        FootprintLinear(f"{path}.out_projection", FFN, WIDTH, f"{name} gated", owner, stream, bias=False),
    )


def _square(path: str, reads: str, stream: FootprintStream) -> FootprintLinear:
    return FootprintLinear(path, WIDTH, WIDTH, reads, "Attention", stream, bias=False)


def _joint() -> FootprintBlock:
    # The attention's result is cut into its two streams, and a matrix copies a cut it reads.
    parts = (
        FootprintKept("image o", WIDTH, needed_by="weights"),
        FootprintKept("text o", WIDTH, "text", needed_by="weights"),
    )
    linears = (
        *(_square(f"attn.to_{part}", "image x1", "image") for part in "qkv"),
        *(_square(f"attn.add_{part}_proj", "text x1", "text") for part in "qkv"),
        _square("attn.to_out.0", "image o", "image"),
        _square("attn.to_add_out", "text o", "text"),
        *_feed_forward("ff", "image", "image"),
        *_feed_forward("ff_context", "text", "text"),
    )
    return FootprintBlock(
        "joint_transformer_blocks.*",
        JOINT,
        (*_stream("image", "image"), *_stream("text", "text"), *_attention(), *parts),
        enters=(FootprintKept("residuals", WIDTH, "joint"),),
        working=(FootprintKept("gradients around the feed-forward", FFN),),
        linears=linears,
    )


def _single() -> FootprintBlock:
    linears = (
        *(_square(f"attn.to_{part}", "both x1", "joint") for part in "qkv"),
        _square("attn.to_out.0", "attention result", "joint"),
        *_feed_forward("ff", "joint", "both"),
    )
    return FootprintBlock(
        "single_transformer_blocks.*",
        SINGLE,
        (*_stream("joint", "both"), *_attention()),
        enters=(FootprintKept("residual", WIDTH, "joint"),),
        working=(FootprintKept("gradients around the feed-forward", FFN, "joint"),),
        linears=linears,
    )


FOOTPRINTS = (
    Footprint(
        family=FAMILY,
        flavour="v0.3",
        denoisers=("transformer",),
        parameters=6_858_605_568,
        width=WIDTH,
        blocks=(_joint(), _single()),
        latents=PixelLatents(4),
        codec=VAE,
        encoders=(PILE_T5,),
        text=FootprintText(CAPTION_TOKENS + REGISTERS, CAPTION_TOKENS * CAPTION_WIDTH),
    ),
)
