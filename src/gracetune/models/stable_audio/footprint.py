"""Stable Audio Open's memory footprint. The denoiser's blocks are traced (`traced.json`, made by
scripts/trace_footprints.py)."""

from __future__ import annotations

from gracetune.models.footprint import (
    AudioLatents,
    Footprint,
    FootprintCodec,
    FootprintEncoder,
    FootprintText,
)
from gracetune.models.footprint_tables import tables_beside

CAPTION_WIDTH = 768
# `encode` and `decode`: elements alive at the peak of a pass, per audio sample. `working`: bytes per token.
VAE = FootprintCodec("VAE (Oobleck)", 156_112_514, encode=644, decode=874)
T5_BASE = FootprintEncoder("text encoder (T5-base)", 109_628_544, working=22_528, tokens=128)
PROJECTION = FootprintEncoder("conditioning projection", 396_544, working=4_096, tokens=2)


FOOTPRINTS = (
    Footprint(
        family="stable_audio",
        flavour="open-1.0",
        denoisers=("transformer",),
        **vars(tables_beside(__file__)["open-1.0"]),
        latents=AudioLatents(64, hop=2048, sample_rate=44_100, longest_seconds=2_097_152 / 44_100, prefix_tokens=1),
        codec=VAE,
        encoders=(T5_BASE, PROJECTION),
        text=FootprintText(tokens=130, cached_elements=130 * CAPTION_WIDTH + 2 * CAPTION_WIDTH),
    ),
)
