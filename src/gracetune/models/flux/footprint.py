"""FLUX.1's memory footprint. Dimensions are those of the config files published with each set of weights.

The saved tensors are those of diffusers' `FluxTransformerBlock` (two streams with a joint attention) and
`FluxSingleTransformerBlock` (one stream; attention and feed-forward share an output matrix).
"""

from __future__ import annotations

from gracetune.models.footprint import (
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

WIDTH, FFN, HEADS = 3072, 12_288, 24
DOUBLE, SINGLE = 19, 38
# `encode` and `decode`: elements alive at the peak of a pass, per pixel. `working`: bytes per token.
VAE = FootprintCodec("VAE (FLUX)", 83_819_683, encode=643, decode=769)
CLIP_L = FootprintEncoder("text encoder (CLIP-L)", 123_060_480, working=24_576, tokens=77, works_while_sampling=False)


def _stream(stream: FootprintStream) -> tuple[FootprintKept, ...]:
    """Saved tensors of one stream of a double block."""
    return (
        FootprintKept(f"{stream} norm1 input", WIDTH, stream, compiled=False),
        FootprintKept(f"{stream} norm1 output", WIDTH, stream, needed_by="scales"),
        FootprintKept(f"{stream} x1", WIDTH, stream, needed_by="weights"),
        FootprintKept(f"{stream} query and key before norm", 2 * WIDTH, stream),
        FootprintKept(f"{stream} o", WIDTH, stream, needed_by="weights"),
        FootprintKept(f"{stream} attention output", WIDTH, stream, needed_by="scales"),
        FootprintKept(f"{stream} residual after attention", WIDTH, stream),
        FootprintKept(f"{stream} norm2 output", WIDTH, stream, needed_by="scales"),
        FootprintKept(f"{stream} x2", WIDTH, stream, needed_by="weights"),
        FootprintKept(f"{stream} before GELU", FFN, stream),
        FootprintKept(f"{stream} after GELU", FFN, stream, needed_by="weights"),
        FootprintKept(f"{stream} feed-forward output", WIDTH, stream, needed_by="scales"),
    )


def _modulation(name: str, owner: str, stream: FootprintStream, parts: int) -> FootprintLinear:
    """A modulation layer. Reads the embedding of noise level and caption, one row per sample."""
    return FootprintLinear(name, WIDTH, parts * WIDTH, "", owner, "sample", default=False, scales=stream)


def _double() -> FootprintBlock:
    """A block with an image and a caption stream."""
    joint = (
        *(FootprintKept(part, WIDTH, "joint") for part in ("query", "key", "value", "attention result")),
        FootprintKept("attention statistics", HEADS, "joint", fp32=True),
    )
    linears = (
        *(FootprintLinear(f"attn.to_{part}", WIDTH, WIDTH, "image x1", "Attention") for part in "qkv"),
        *(FootprintLinear(f"attn.add_{part}_proj", WIDTH, WIDTH, "text x1", "Attention", "text") for part in "qkv"),
        FootprintLinear("attn.to_out.0", WIDTH, WIDTH, "image o", "Attention"),
        FootprintLinear("attn.to_add_out", WIDTH, WIDTH, "text o", "Attention", "text"),
        FootprintLinear("ff.net.0.proj", WIDTH, FFN, "image x2", "FeedForward"),
        FootprintLinear("ff.net.2", FFN, WIDTH, "image after GELU", "FeedForward"),
        FootprintLinear("ff_context.net.0.proj", WIDTH, FFN, "text x2", "FeedForward", "text"),
        FootprintLinear("ff_context.net.2", FFN, WIDTH, "text after GELU", "FeedForward", "text"),
        _modulation("norm1.linear", "AdaLayerNormZero", "image", 6),
        _modulation("norm1_context.linear", "AdaLayerNormZero", "text", 6),
    )
    return FootprintBlock(
        "transformer_blocks.*",
        DOUBLE,
        (*_stream("image"), *_stream("text"), *joint),
        enters=(FootprintKept("residuals", WIDTH, "joint"),),
        working=(
            FootprintKept("gradients around the feed-forward", 2 * FFN),
            FootprintKept("gradients of the residual", 2 * WIDTH),
        ),
        linears=linears,
    )


def _single() -> FootprintBlock:
    """A block with one stream of image and caption tokens."""
    kept = (
        FootprintKept("norm input", WIDTH, "joint", compiled=False),
        FootprintKept("norm output", WIDTH, "joint", needed_by="scales"),
        FootprintKept("x", WIDTH, "joint", needed_by="weights"),
        FootprintKept("query and key before norm", 2 * WIDTH, "joint"),
        *(FootprintKept(part, WIDTH, "joint") for part in ("query", "key", "value", "attention result")),
        FootprintKept("attention statistics", HEADS, "joint", fp32=True),
        FootprintKept("before GELU", FFN, "joint"),
        FootprintKept("attention and feed-forward side by side", WIDTH + FFN, "joint", needed_by="weights"),
        FootprintKept("block output", WIDTH, "joint", needed_by="scales"),
    )
    linears = (
        *(FootprintLinear(f"attn.to_{part}", WIDTH, WIDTH, "x", "Attention", "joint") for part in "qkv"),
        FootprintLinear("proj_mlp", WIDTH, FFN, "x", "FluxSingleTransformerBlock", "joint"),
        FootprintLinear(
            "proj_out",
            WIDTH + FFN,
            WIDTH,
            "attention and feed-forward side by side",
            "FluxSingleTransformerBlock",
            "joint",
        ),
        _modulation("norm.linear", "AdaLayerNormZeroSingle", "joint", 3),
    )
    working = (
        FootprintKept("gradients around the feed-forward", 3 * FFN // 2, "joint"),
        FootprintKept("gradients of the residual", 4 * WIDTH, "joint"),
    )
    return FootprintBlock(
        "single_transformer_blocks.*", SINGLE, kept, (FootprintKept("residuals", WIDTH, "joint"),), working, linears
    )


def _flux(flavour: str, parameters: int, *, caption_tokens: int = 512, edits: bool = False) -> Footprint:
    t5 = FootprintEncoder(
        "text encoder (T5-XXL)", 4_762_310_656, working=200_704, tokens=caption_tokens, works_while_sampling=False
    )
    return Footprint(
        family="flux",
        flavour=flavour,
        denoisers=("transformer",),
        parameters=parameters,
        width=WIDTH,
        blocks=(_double(), _single()),
        latents=PixelLatents(16),
        codec=VAE,
        encoders=(t5, CLIP_L),
        text=FootprintText(caption_tokens, caption_tokens * 4096 + 768),
        references=edits,
    )


FOOTPRINTS = (
    _flux("dev", 11_901_408_320),
    _flux("krea", 11_901_408_320),
    _flux("schnell", 11_891_178_560, caption_tokens=256),
    _flux("kontext", 11_901_408_320, edits=True),
)
