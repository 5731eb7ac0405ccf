"""FLUX.1's memory footprint. Dimensions are those of the config files published with each set of weights.

The saved tensors are those of diffusers' `FluxTransformerBlock` (two streams with a joint attention) and
`FluxSingleTransformerBlock` (one stream; attention and feed-forward share an output matrix).
"""

from __future__ import annotations

from gracetune.models.footprint import (
    Block,
    Codec,
    Encoder,
    Footprint,
    Kept,
    Linear,
    PixelLatents,
    Stream,
    Text,
)

WIDTH, FFN, HEADS = 3072, 12_288, 24
DOUBLE, SINGLE = 19, 38
VAE = Codec("VAE (FLUX)", 83_819_683, encode=643, decode=769)
CLIP_L = Encoder("text encoder (CLIP-L)", 123_060_480, working=24_576, tokens=77, draws=False)


def _stream(stream: Stream) -> tuple[Kept, ...]:
    """Saved tensors of one stream of a double block."""
    return (
        Kept(f"{stream} norm1 input", WIDTH, stream, compiled=False),
        Kept(f"{stream} norm1 output", WIDTH, stream, needed_by="scales"),
        Kept(f"{stream} x1", WIDTH, stream, needed_by="weights"),
        Kept(f"{stream} query and key before norm", 2 * WIDTH, stream),
        Kept(f"{stream} o", WIDTH, stream, needed_by="weights"),
        Kept(f"{stream} attention output", WIDTH, stream, needed_by="scales"),
        Kept(f"{stream} residual after attention", WIDTH, stream),
        Kept(f"{stream} norm2 output", WIDTH, stream, needed_by="scales"),
        Kept(f"{stream} x2", WIDTH, stream, needed_by="weights"),
        Kept(f"{stream} before GELU", FFN, stream),
        Kept(f"{stream} after GELU", FFN, stream, needed_by="weights"),
        Kept(f"{stream} feed-forward output", WIDTH, stream, needed_by="scales"),
    )


def _modulation(name: str, owner: str, stream: Stream, parts: int) -> Linear:
    """A modulation layer. Reads the embedding of noise level and caption, one row per sample."""
    return Linear(name, WIDTH, parts * WIDTH, "", owner, "sample", default=False, scales=stream)


def _double() -> Block:
    """A block with an image and a caption stream."""
    joint = (
        *(Kept(part, WIDTH, "joint") for part in ("query", "key", "value", "attention result")),
        Kept("attention statistics", HEADS, "joint", fp32=True),
    )
    linears = (
        *(Linear(f"attn.to_{part}", WIDTH, WIDTH, "image x1", "Attention") for part in "qkv"),
        *(Linear(f"attn.add_{part}_proj", WIDTH, WIDTH, "text x1", "Attention", "text") for part in "qkv"),
        Linear("attn.to_out.0", WIDTH, WIDTH, "image o", "Attention"),
        Linear("attn.to_add_out", WIDTH, WIDTH, "text o", "Attention", "text"),
        Linear("ff.net.0.proj", WIDTH, FFN, "image x2", "FeedForward"),
        Linear("ff.net.2", FFN, WIDTH, "image after GELU", "FeedForward"),
        Linear("ff_context.net.0.proj", WIDTH, FFN, "text x2", "FeedForward", "text"),
        Linear("ff_context.net.2", FFN, WIDTH, "text after GELU", "FeedForward", "text"),
        _modulation("norm1.linear", "AdaLayerNormZero", "image", 6),
        _modulation("norm1_context.linear", "AdaLayerNormZero", "text", 6),
    )
    return Block(
        "transformer_blocks.*",
        DOUBLE,
        (*_stream("image"), *_stream("text"), *joint),
        enters=(Kept("residuals", WIDTH, "joint"),),
        working=(Kept("gradients around the feed-forward", 2 * FFN), Kept("gradients of the residual", 2 * WIDTH)),
        linears=linears,
    )


def _single() -> Block:
    """A block with one stream of image and caption tokens."""
    kept = (
        Kept("norm input", WIDTH, "joint", compiled=False),
        Kept("norm output", WIDTH, "joint", needed_by="scales"),
        Kept("x", WIDTH, "joint", needed_by="weights"),
        Kept("query and key before norm", 2 * WIDTH, "joint"),
        *(Kept(part, WIDTH, "joint") for part in ("query", "key", "value", "attention result")),
        Kept("attention statistics", HEADS, "joint", fp32=True),
        Kept("before GELU", FFN, "joint"),
        Kept("attention and feed-forward side by side", WIDTH + FFN, "joint", needed_by="weights"),
        Kept("block output", WIDTH, "joint", needed_by="scales"),
    )
    linears = (
        *(Linear(f"attn.to_{part}", WIDTH, WIDTH, "x", "Attention", "joint") for part in "qkv"),
        Linear("proj_mlp", WIDTH, FFN, "x", "FluxSingleTransformerBlock", "joint"),
        Linear(
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
        Kept("gradients around the feed-forward", 3 * FFN // 2, "joint"),
        Kept("of the residual", 4 * WIDTH, "joint"),
    )
    return Block("single_transformer_blocks.*", SINGLE, kept, (Kept("residuals", WIDTH, "joint"),), working, linears)


def _flux(flavour: str, parameters: int, *, caption_tokens: int = 512, edits: bool = False) -> Footprint:
    t5 = Encoder("text encoder (T5-XXL)", 4_762_310_656, working=200_704, tokens=caption_tokens, draws=False)
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
        text=Text(caption_tokens, caption_tokens * 4096 + 768),
        references=edits,
    )


FOOTPRINTS = (
    _flux("dev", 11_901_408_320),
    _flux("krea", 11_901_408_320),
    _flux("schnell", 11_891_178_560, caption_tokens=256),
    _flux("kontext", 11_901_408_320, edits=True),
)
