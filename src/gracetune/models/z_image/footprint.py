"""Z-Image's memory footprint. The denoiser's blocks are traced (`traced.json`, made by scripts/trace_footprints.py).

One stream of image and caption tokens. Before it, two refiner blocks each see the image alone and the caption alone.
"""

from __future__ import annotations

from gracetune.models.common.encoder_footprints import QWEN3_4B
from gracetune.models.footprint import (
    Footprint,
    FootprintCodec,
    FootprintText,
    PixelLatents,
)
from gracetune.models.footprint_tables import NOT_TRACED, tables_beside

TRACED = tables_beside(__file__)
CAPTION_WIDTH = 2560
CAPTION_TOKENS = 512
# `encode` and `decode`: elements alive at the peak of a pass, per pixel. `working`: bytes per token.
VAE = FootprintCodec("VAE (FLUX)", 83_819_683, encode=643, decode=769)


def _z_image(flavour: str, measured: str = "") -> Footprint:
    return Footprint(
        family="z_image",
        flavour=flavour,
        denoisers=("transformer",),
        **vars(TRACED.get(flavour, NOT_TRACED)),
        latents=PixelLatents(16),
        codec=VAE,
        encoders=(QWEN3_4B,),
        text=FootprintText(CAPTION_TOKENS, CAPTION_TOKENS * CAPTION_WIDTH),
        measured=measured,
    )


FOOTPRINTS = (_z_image("base", measured="one H200: 1024x1024, LoRA (docs/performance.md)"), _z_image("turbo"))
