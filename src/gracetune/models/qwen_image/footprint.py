"""Qwen-Image's memory footprint. Dimensions are those of the config files published with each set of weights.

The saved tensors are those of diffusers' `QwenImageTransformerBlock`: an image and a caption stream with separate
weights and a joint attention. Its query and key norms are written in plain PyTorch, which saves fp32 copies in eager
mode.
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

WIDTH, FFN, HEADS, LAYERS = 3072, 12_288, 24, 60
CAPTION_WIDTH = 3584
CAPTION_TOKENS = 512
PARAMETERS = 20_430_401_088
# `encode` and `decode`: elements alive at the peak of a pass, per pixel. `working`: bytes per token.
VAE = FootprintCodec("VAE (Qwen-Image)", 126_892_531, encode=969, decode=1_731)


def _stream(stream: FootprintStream, *, modulated_by_token: bool) -> tuple[FootprintKept, ...]:
    """Saved tensors of one stream. `modulated_by_token`: every token has its own scales and gates (Edit-2511)."""
    kept: tuple[FootprintKept, ...] = (
        FootprintKept(f"{stream} norm1 input", WIDTH, stream, compiled=False),
        FootprintKept(f"{stream} norm1 output", WIDTH, stream, needed_by="scales"),
        FootprintKept(f"{stream} x1", WIDTH, stream, needed_by="weights"),
        FootprintKept(f"{stream} query and key before norm", 2 * WIDTH, stream),
        FootprintKept(f"{stream} query and key in fp32", 2 * WIDTH, stream, fp32=True, compiled=False),
        FootprintKept(f"{stream} query and key before the norm's weight", 2 * WIDTH, stream, needed_by="full"),
        FootprintKept(f"{stream} o", WIDTH, stream, needed_by="weights"),
        FootprintKept(f"{stream} attention output", WIDTH, stream, needed_by="scales"),
        FootprintKept(f"{stream} residual after attention", WIDTH, stream),
        FootprintKept(f"{stream} norm2 output", WIDTH, stream, needed_by="scales"),
        FootprintKept(f"{stream} x2", WIDTH, stream, needed_by="weights"),
        FootprintKept(f"{stream} before GELU", FFN, stream),
        FootprintKept(f"{stream} after GELU", FFN, stream, needed_by="weights"),
        FootprintKept(f"{stream} feed-forward output", WIDTH, stream, needed_by="scales"),
    )
    if modulated_by_token:
        kept += (FootprintKept(f"{stream} scales and gates", 4 * WIDTH, stream, compiled=False),)
    return kept


def _linears() -> tuple[FootprintLinear, ...]:
    return (
        *(FootprintLinear(f"attn.to_{part}", WIDTH, WIDTH, "image x1", "Attention") for part in "qkv"),
        *(FootprintLinear(f"attn.add_{part}_proj", WIDTH, WIDTH, "text x1", "Attention", "text") for part in "qkv"),
        FootprintLinear("attn.to_out.0", WIDTH, WIDTH, "image o", "Attention"),
        FootprintLinear("attn.to_add_out", WIDTH, WIDTH, "text o", "Attention", "text"),
        FootprintLinear("img_mlp.net.0.proj", WIDTH, FFN, "image x2", "FeedForward"),
        FootprintLinear("img_mlp.net.2", FFN, WIDTH, "image after GELU", "FeedForward"),
        FootprintLinear("txt_mlp.net.0.proj", WIDTH, FFN, "text x2", "FeedForward", "text"),
        FootprintLinear("txt_mlp.net.2", FFN, WIDTH, "text after GELU", "FeedForward", "text"),
        # The modulation reads the embedding of the noise level, one row per sample.
        FootprintLinear("img_mod.1", WIDTH, 6 * WIDTH, "", "", "sample", default=False, scales="image"),
        FootprintLinear("txt_mod.1", WIDTH, 6 * WIDTH, "", "", "sample", default=False, scales="text"),
    )


def _block(*, modulated_by_token: bool) -> FootprintBlock:
    joint = (
        *(FootprintKept(part, WIDTH, "joint") for part in ("query", "key", "value", "attention result")),
        FootprintKept("attention statistics", HEADS, "joint", fp32=True),
    )
    kept = (
        *_stream("image", modulated_by_token=modulated_by_token),
        *_stream("text", modulated_by_token=False),
        *joint,
    )
    return FootprintBlock(
        "transformer_blocks.*",
        LAYERS,
        kept,
        enters=(FootprintKept("residuals", WIDTH, "joint"),),
        working=(
            FootprintKept("gradients around the feed-forward", 2 * FFN),
            FootprintKept("gradients of the residual", 2 * WIDTH),
        ),
        linears=_linears(),
    )


def _qwen(
    flavour: str, *, reference_tokens: int = 0, edits: bool = False, modulated_by_token: bool = False
) -> Footprint:
    """`reference_tokens`: tokens of a reference image in the text encoder, in the caption's sequence."""
    tokens = CAPTION_TOKENS + reference_tokens
    return Footprint(
        family="qwen_image",
        flavour=flavour,
        denoisers=("transformer",),
        parameters=PARAMETERS,
        width=WIDTH,
        blocks=(_block(modulated_by_token=modulated_by_token),),
        latents=PixelLatents(16),
        codec=VAE,
        encoders=(
            FootprintEncoder(
                "text encoder (Qwen2.5-VL 7B)",
                8_292_166_656,
                working=569_344,
                tokens=tokens,
                sees_references=edits,
                works_while_sampling=edits,
            ),
        ),
        text=FootprintText(tokens, tokens * CAPTION_WIDTH),
        references=edits,
    )


# A one-megapixel image has 1,338 tokens of 28x28 pixels. From 2509 on the encoder gets 384x384 pixels, 189 tokens.
FOOTPRINTS = (
    _qwen("t2i"),
    _qwen("t2i-2512"),
    _qwen("edit", reference_tokens=1_338, edits=True),
    _qwen("edit-2509", reference_tokens=189, edits=True),
    _qwen("edit-2511", reference_tokens=189, edits=True, modulated_by_token=True),
)
