"""Wan's memory footprint. Dimensions are those of the config files published with each set of weights.

The saved tensors are those of diffusers' `WanTransformerBlock`, in the order of its forward pass. Its norms compute in
fp32, so eager autograd saves an fp32 copy of the residual at each of the three; the compiler saves the bf16 residual
instead. What it saves under an activation budget is traced (`traced.json`, made by scripts/trace_footprints.py).
"""

from __future__ import annotations

from gracetune.models.footprint import (
    BudgetShare,
    Footprint,
    FootprintBlock,
    FootprintCodec,
    FootprintEncoder,
    FootprintKept,
    FootprintLinear,
    FootprintText,
    PixelLatents,
)
from gracetune.models.footprint_tables import tables_beside

# `encode` and `decode`: elements alive at the peak of a pass, per pixel. `working`: bytes per token.
UMT5_XXL = FootprintEncoder(
    "text encoder (UMT5-XXL)", 5_680_910_336, working=196_608, tokens=512, works_while_sampling=False
)
CLIP_VIT_H = FootprintEncoder("image encoder (CLIP ViT-H)", 630_766_080, working=65_536, tokens=257, kind="vision")
VAE_2_1 = FootprintCodec(
    "VAE (Wan 2.1)", 126_892_531, encode=969, decode=1_731, encode_video=3_525, decode_video=4_920, element_bytes=4
)
VAE_2_2 = FootprintCodec(
    "VAE (Wan 2.2)", 704_688_668, encode=491, decode=1_452, encode_video=1_895, decode_video=5_435, element_bytes=4
)
_FROM_TEXT = PixelLatents(16, temporal=4, default_frames=81)
# Image-to-video weights read 36 channels: 16 latent ones, 16 of the first frame and 4 of its mask.
_FROM_IMAGE = PixelLatents(16, temporal=4, condition_channels=20, default_frames=81)
CAPTION = FootprintText(tokens=512, cached_elements=512 * 4096)
TRACED = tables_beside(__file__)
MEASURED = "one H200: 1024x1024, one frame, LoRA and LoKr (docs/estimate.md)"


def _self_attention(width: int) -> tuple[FootprintLinear, ...]:
    return (
        *(FootprintLinear(f"attn1.to_{part}", width, width, "x1", "Attention") for part in "qkv"),
        FootprintLinear("attn1.to_out.0", width, width, "o1", "Attention"),
    )


def _cross_attention(width: int, *, image_context: bool) -> tuple[FootprintLinear, ...]:
    """Keys and values read the caption, which needs no gradient, so their weights are not saved for the backward
    pass."""
    caption, output = ("caption slices", "o2 and image") if image_context else ("", "o2")
    return (
        FootprintLinear("attn2.to_q", width, width, "x2", "Attention"),
        *(
            FootprintLinear(f"attn2.to_{part}", width, width, caption, "Attention", "text", backward=False)
            for part in "kv"
        ),
        FootprintLinear("attn2.to_out.0", width, width, output, "Attention"),
    )


def _block(
    width: int, ffn: int, heads: int, layers: int, budgets: tuple[BudgetShare, ...], *, image_context: bool
) -> FootprintBlock:
    """`image_context`: cross-attention also reads an image encoder (2.1 image-to-video)."""
    kept: tuple[FootprintKept, ...] = (
        FootprintKept("norm1 input", width, fp32=True, compiled=False),
        FootprintKept("norm1 output", width, needed_by="full", fp32=True),
        FootprintKept("x1", width, needed_by="weights"),
        FootprintKept("query before norm", width),
        FootprintKept("key before norm", width),
        FootprintKept("query", width),
        FootprintKept("key", width),
        FootprintKept("value", width),
        FootprintKept("o1", width),
        FootprintKept("attention statistics", 2 * heads, fp32=True),
        FootprintKept("attention output", width, needed_by="full"),
        FootprintKept("norm2 input", width, fp32=True, compiled=False),
        FootprintKept("residual after attention", width, eager=False),
        FootprintKept("x2", width, needed_by="weights"),
        FootprintKept("cross query before norm", width),
        FootprintKept("cross query", width),
        FootprintKept("cross key before norm", width, "text"),
        FootprintKept("cross key", width, "text"),
        FootprintKept("cross value", width, "text"),
        FootprintKept("o2", width),
        FootprintKept("norm3 input", width, fp32=True, compiled=False),
        FootprintKept("residual after cross-attention", width, eager=False),
        FootprintKept("norm3 output", width, needed_by="full", fp32=True),
        FootprintKept("x3", width, needed_by="weights"),
        FootprintKept("before GELU", ffn),
        FootprintKept("after GELU", ffn, needed_by="weights"),
        FootprintKept("feed-forward output", width, needed_by="full", fp32=True),
    )
    linears: tuple[FootprintLinear, ...] = (
        *_self_attention(width),
        *_cross_attention(width, image_context=image_context),
        FootprintLinear("ffn.net.0.proj", width, ffn, "x3", "FeedForward"),
        FootprintLinear("ffn.net.2", ffn, width, "after GELU", "FeedForward"),
    )
    if image_context:
        # Caption and image arrive in one tensor, and each matrix that reads a slice of it saves that slice.
        kept += (
            FootprintKept("caption slices", 2 * width, "text", needed_by="weights"),
            FootprintKept("image slices", 2 * width, "vision", needed_by="weights"),
            FootprintKept("image key before norm", width, "vision"),
            FootprintKept("image key", width, "vision"),
            FootprintKept("image value", width, "vision"),
            FootprintKept("image attention output", width),
            FootprintKept("image attention statistics", heads, fp32=True),
            FootprintKept("o2 and image", width, needed_by="weights"),
        )
        linears += tuple(
            FootprintLinear(
                f"attn2.add_{part}_proj", width, width, "image slices", "Attention", "vision", backward=False
            )
            for part in "kv"
        )
    return FootprintBlock(
        "blocks.*",
        layers,
        kept,
        enters=(FootprintKept("residual", width),),
        working=(
            FootprintKept("gradients around the feed-forward", 2 * ffn),
            FootprintKept("gradients of the residual", 4 * width),
        ),
        linears=linears,
        budgets=budgets,
    )


def _wan(
    flavour: str,
    parameters: int,
    *,
    width: int = 5120,
    ffn: int = 13_824,
    layers: int = 40,
    latents: PixelLatents = _FROM_TEXT,
    codec: FootprintCodec = VAE_2_1,
    two_experts: bool = False,
    image_context: bool = False,
    measured: str = "",
) -> Footprint:
    (traced,) = TRACED[flavour].blocks
    return Footprint(
        family="wan",
        flavour=flavour,
        denoisers=("high-noise expert", "low-noise expert") if two_experts else ("transformer",),
        parameters=parameters,
        width=width,
        blocks=(_block(width, ffn, width // 128, layers, traced.budgets, image_context=image_context),),
        latents=latents,
        codec=codec,
        encoders=(UMT5_XXL, CLIP_VIT_H) if image_context else (UMT5_XXL,),
        text=CAPTION,
        vision_tokens=257 if image_context else 0,
        measured=measured,
    )


FOOTPRINTS = (
    _wan("t2v-14b-2.2", 14_288_491_584, two_experts=True, measured=MEASURED),
    _wan("i2v-14b-2.2", 14_288_901_184, latents=_FROM_IMAGE, two_experts=True),
    _wan("ti2v-5b-2.2", 4_999_787_712, width=3072, ffn=14_336, layers=30, codec=VAE_2_2,
         latents=PixelLatents(48, spatial=16, temporal=4, default_frames=121)),
    _wan("t2v-1.3b-2.1", 1_418_996_800, width=1536, ffn=8_960, layers=30),
    _wan("t2v-14b-2.1", 14_288_491_584, measured=MEASURED),
    _wan("i2v-14b-480p-2.1", 16_394_878_784, latents=_FROM_IMAGE, image_context=True),
    _wan("i2v-14b-720p-2.1", 16_394_878_784, latents=_FROM_IMAGE, image_context=True),
)  # fmt: skip
