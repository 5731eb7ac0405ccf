"""Krea 2's memory footprint. Dimensions are those of the config files published with each set of weights.

The saved tensors are traced (`traced.json`, made by scripts/trace_footprints.py): one stream of caption and image
tokens, with keys and values repeated for all heads, and norms in fp32.

The text fusion before the blocks is not listed. No gradient reaches it unless it is trained, which is not the default;
then eager autograd saves 3.3 MiB more for each caption token.
"""

from __future__ import annotations

from gracetune.models.footprint import Footprint, FootprintEncoder, FootprintText, PixelLatents
from gracetune.models.footprint_tables import tables_beside
from gracetune.models.qwen_image.footprint import VAE

CAPTION_TOKENS = 512
TAPS, CAPTION_WIDTH = 12, 2560
QWEN3_VL = FootprintEncoder(
    "text encoder (Qwen3-VL 4B)", 4_437_815_808, working=400_904, tokens=CAPTION_TOKENS, works_while_sampling=False
)
TRACED = tables_beside(__file__)


def _krea2(flavour: str) -> Footprint:
    traced = TRACED[flavour]
    return Footprint(
        family="krea2",
        flavour=flavour,
        denoisers=("transformer",),
        parameters=traced.parameters,
        width=traced.width,
        blocks=traced.blocks,
        latents=PixelLatents(16),
        codec=VAE,
        encoders=(QWEN3_VL,),
        text=FootprintText(CAPTION_TOKENS, CAPTION_TOKENS * TAPS * CAPTION_WIDTH),
    )


FOOTPRINTS = (_krea2("raw"), _krea2("turbo"))
