"""Qwen-Image's memory footprint. The denoiser's blocks are traced (`traced.json`, made by
scripts/trace_footprints.py)."""

from __future__ import annotations

from gracetune.models.footprint import (
    Footprint,
    FootprintCodec,
    FootprintEncoder,
    FootprintText,
    PixelLatents,
)
from gracetune.models.footprint_tables import NOT_TRACED, tables_beside

TRACED = tables_beside(__file__)
CAPTION_WIDTH = 3584
CAPTION_TOKENS = 512
# `encode` and `decode`: elements alive at the peak of a pass, per pixel. `working`: bytes per token.
VAE = FootprintCodec("VAE (Qwen-Image)", 126_892_531, encode=969, decode=1_731)


def _qwen(flavour: str, *, reference_tokens: int = 0, edits: bool = False, measured: str = "") -> Footprint:
    """`reference_tokens`: tokens of a reference image in the text encoder, in the caption's sequence."""
    tokens = CAPTION_TOKENS + reference_tokens
    return Footprint(
        family="qwen_image",
        flavour=flavour,
        denoisers=("transformer",),
        **vars(TRACED.get(flavour, NOT_TRACED)),
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
        measured=measured,
    )


# A one-megapixel image has 1,338 tokens of 28x28 pixels. From 2509 on the encoder gets 384x384 pixels, 189 tokens.
FOOTPRINTS = (
    _qwen("t2i", measured="one H200: 1024x1024, LoRA (docs/performance.md)"),
    _qwen("t2i-2512"),
    _qwen("edit", reference_tokens=1_338, edits=True),
    _qwen("edit-2509", reference_tokens=189, edits=True),
    _qwen("edit-2511", reference_tokens=189, edits=True),
)
