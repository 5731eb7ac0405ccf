"""What AuraFlow needs in memory. Dimensions: the config files published with the weights.

The denoiser's blocks are not listed: gracetune traces them (`example_inputs` in published.py says how it is called).
"""

from __future__ import annotations

from gracetune.extension import Footprint, FootprintCodec, FootprintEncoder, FootprintText, PixelLatents
from gracetune_auraflow import FAMILY

CAPTION_TOKENS, REGISTERS = 256, 8
CAPTION_WIDTH = 2048
VAE = FootprintCodec("VAE (SDXL)", 83_653_863, encode=643, decode=769, element_bytes=4)
PILE_T5 = FootprintEncoder("text encoder (Pile-T5-XL)", 1_223_550_976, working=61_568, tokens=CAPTION_TOKENS)

FOOTPRINTS = (
    Footprint(
        family=FAMILY,
        flavour="v0.3",
        denoisers=("transformer",),
        latents=PixelLatents(4),
        codec=VAE,
        encoders=(PILE_T5,),
        text=FootprintText(CAPTION_TOKENS + REGISTERS, CAPTION_TOKENS * CAPTION_WIDTH),
    ),
)
