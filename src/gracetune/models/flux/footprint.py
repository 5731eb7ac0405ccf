"""FLUX.1's memory footprint. The denoiser's blocks are traced (`traced.json`, made by scripts/trace_footprints.py)."""

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
# `encode` and `decode`: elements alive at the peak of a pass, per pixel. `working`: bytes per token.
VAE = FootprintCodec("VAE (FLUX)", 83_819_683, encode=643, decode=769)
CLIP_L = FootprintEncoder("text encoder (CLIP-L)", 123_060_480, working=24_576, tokens=77, works_while_sampling=False)


def _flux(flavour: str, *, caption_tokens: int = 512, edits: bool = False, measured: str = "") -> Footprint:
    t5 = FootprintEncoder(
        "text encoder (T5-XXL)", 4_762_310_656, working=200_704, tokens=caption_tokens, works_while_sampling=False
    )
    return Footprint(
        family="flux",
        flavour=flavour,
        denoisers=("transformer",),
        **vars(TRACED.get(flavour, NOT_TRACED)),
        latents=PixelLatents(16),
        codec=VAE,
        encoders=(t5, CLIP_L),
        text=FootprintText(caption_tokens, caption_tokens * 4096 + 768),
        references=edits,
        measured=measured,
    )


FOOTPRINTS = (
    _flux("dev", measured="one H200: 1024x1024, LoRA (docs/performance.md)"),
    _flux("krea"),
    _flux("schnell", caption_tokens=256),
    _flux("kontext", edits=True),
)
