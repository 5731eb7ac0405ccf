"""FLUX.2's memory footprint. Dimensions are those of the config files published with each set of weights.

The blocks are traced from diffusers' model (`traced.json`, made by scripts/trace_footprints.py).
"""

from __future__ import annotations

from gracetune.models.common.encoder_footprints import MISTRAL_SMALL_3, QWEN3_4B, QWEN3_8B
from gracetune.models.footprint import Footprint, FootprintCodec, FootprintEncoder, FootprintText, PixelLatents
from gracetune.models.footprint_tables import tables_beside

CAPTION_TOKENS = 512
TRACED = tables_beside(__file__)
VAE = FootprintCodec("VAE (FLUX.2)", 84_046_115, encode=640, decode=769)


def _flux2(flavour: str, encoder: FootprintEncoder, caption_width: int) -> Footprint:
    traced = TRACED[flavour]
    return Footprint(
        family="flux2",
        flavour=flavour,
        denoisers=("transformer",),
        parameters=traced.parameters,
        width=traced.width,
        blocks=traced.blocks,
        latents=PixelLatents(32),
        codec=VAE,
        encoders=(encoder,),
        text=FootprintText(CAPTION_TOKENS, CAPTION_TOKENS * caption_width),
        references=True,
    )


FOOTPRINTS = (
    _flux2("dev", MISTRAL_SMALL_3, 15_360),
    _flux2("klein-base-9b", QWEN3_8B, 12_288),
    _flux2("klein-base-4b", QWEN3_4B, 7_680),
    _flux2("klein-9b", QWEN3_8B, 12_288),
    _flux2("klein-4b", QWEN3_4B, 7_680),
)
