"""Wan's memory footprint. Dimensions are those of the config files published with each set of weights.

The saved tensors are those of diffusers' `WanTransformerBlock`, in the order of its forward pass. Its norms compute in
fp32, so eager autograd saves an fp32 copy of the residual at each of the three; the compiler saves the bf16 residual
instead.
"""

from __future__ import annotations

from gracetune.models.footprint import Block, Codec, Encoder, Footprint, Kept, Linear, PixelLatents, Text

UMT5_XXL = Encoder("text encoder (UMT5-XXL)", 5_680_910_336, working=196_608, tokens=512, draws=False)
CLIP_VIT_H = Encoder("image encoder (CLIP ViT-H)", 630_766_080, working=65_536, tokens=257, kind="vision")
VAE_2_1 = Codec(
    "VAE (Wan 2.1)", 126_892_531, encode=969, decode=1_731, encode_video=3_525, decode_video=4_920, element_bytes=4
)
VAE_2_2 = Codec(
    "VAE (Wan 2.2)", 704_688_668, encode=491, decode=1_452, encode_video=1_895, decode_video=5_435, element_bytes=4
)
_FROM_TEXT = PixelLatents(16, temporal=4, default_frames=81)
# Image-to-video weights read 36 channels: 16 latent ones, 16 of the first frame and 4 of its mask.
_FROM_IMAGE = PixelLatents(16, temporal=4, condition_channels=20, default_frames=81)
CAPTION = Text(tokens=512, cached_elements=512 * 4096)
MEASURED = "one H200: 1024x1024, one frame, LoRA and LoKr (docs/estimate.md)"


def _self_attention(width: int) -> tuple[Linear, ...]:
    return (
        *(Linear(f"attn1.to_{part}", width, width, "x1", "Attention") for part in "qkv"),
        Linear("attn1.to_out.0", width, width, "o1", "Attention"),
    )


def _cross_attention(width: int, *, image_context: bool) -> tuple[Linear, ...]:
    """Keys and values read the caption, which needs no gradient, so their weights are not saved for the backward
    pass."""
    caption, output = ("caption slices", "o2 and image") if image_context else ("", "o2")
    return (
        Linear("attn2.to_q", width, width, "x2", "Attention"),
        *(Linear(f"attn2.to_{part}", width, width, caption, "Attention", "text", backward=False) for part in "kv"),
        Linear("attn2.to_out.0", width, width, output, "Attention"),
    )


def _block(width: int, ffn: int, heads: int, layers: int, *, image_context: bool) -> Block:
    """`image_context`: cross-attention also reads an image encoder (2.1 image-to-video)."""
    kept: tuple[Kept, ...] = (
        Kept("norm1 input", width, fp32=True, compiled=False),
        Kept("norm1 output", width, needed_by="full", fp32=True),
        Kept("x1", width, needed_by="weights"),
        Kept("query before norm", width),
        Kept("key before norm", width),
        Kept("query", width),
        Kept("key", width),
        Kept("value", width),
        Kept("o1", width),
        Kept("attention statistics", 2 * heads, fp32=True),
        Kept("attention output", width, needed_by="full"),
        Kept("norm2 input", width, fp32=True, compiled=False),
        Kept("residual after attention", width, eager=False),
        Kept("x2", width, needed_by="weights"),
        Kept("cross query before norm", width),
        Kept("cross query", width),
        Kept("cross key before norm", width, "text"),
        Kept("cross key", width, "text"),
        Kept("cross value", width, "text"),
        Kept("o2", width),
        Kept("norm3 input", width, fp32=True, compiled=False),
        Kept("residual after cross-attention", width, eager=False),
        Kept("norm3 output", width, needed_by="full", fp32=True),
        Kept("x3", width, needed_by="weights"),
        Kept("before GELU", ffn),
        Kept("after GELU", ffn, needed_by="weights"),
        Kept("feed-forward output", width, needed_by="full", fp32=True),
    )
    linears: tuple[Linear, ...] = (
        *_self_attention(width),
        *_cross_attention(width, image_context=image_context),
        Linear("ffn.net.0.proj", width, ffn, "x3", "FeedForward"),
        Linear("ffn.net.2", ffn, width, "after GELU", "FeedForward"),
    )
    if image_context:
        # Caption and image arrive in one tensor, and each matrix that reads a slice of it saves that slice.
        kept += (
            Kept("caption slices", 2 * width, "text", needed_by="weights"),
            Kept("image slices", 2 * width, "vision", needed_by="weights"),
            Kept("image key before norm", width, "vision"),
            Kept("image key", width, "vision"),
            Kept("image value", width, "vision"),
            Kept("image attention output", width),
            Kept("image attention statistics", heads, fp32=True),
            Kept("o2 and image", width, needed_by="weights"),
        )
        linears += tuple(
            Linear(f"attn2.add_{part}_proj", width, width, "image slices", "Attention", "vision", backward=False)
            for part in "kv"
        )
    return Block(
        "blocks.*",
        layers,
        kept,
        enters=(Kept("residual", width),),
        working=(Kept("gradients around the feed-forward", 2 * ffn), Kept("gradients of the residual", 4 * width)),
        linears=linears,
    )


def _wan(
    flavour: str,
    parameters: int,
    *,
    width: int = 5120,
    ffn: int = 13_824,
    layers: int = 40,
    latents: PixelLatents = _FROM_TEXT,
    codec: Codec = VAE_2_1,
    two_experts: bool = False,
    image_context: bool = False,
    measured: str = "",
) -> Footprint:
    return Footprint(
        family="wan",
        flavour=flavour,
        denoisers=("high-noise expert", "low-noise expert") if two_experts else ("transformer",),
        parameters=parameters,
        width=width,
        blocks=(_block(width, ffn, width // 128, layers, image_context=image_context),),
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
