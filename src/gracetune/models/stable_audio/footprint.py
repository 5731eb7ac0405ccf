"""Stable Audio Open's memory footprint. Dimensions are those of the config published with the weights.

The saved tensors are those of diffusers' `StableAudioDiTBlock`: self-attention, cross-attention, SwiGLU.
"""

from __future__ import annotations

from gracetune.models.footprint import (
    AudioLatents,
    Footprint,
    FootprintBlock,
    FootprintCodec,
    FootprintEncoder,
    FootprintKept,
    FootprintLinear,
    FootprintText,
)

WIDTH, FFN, HEADS, LAYERS = 1536, 6_144, 24, 24
CAPTION_WIDTH = 768
# `encode` and `decode`: elements alive at the peak of a pass, per audio sample. `working`: bytes per token.
VAE = FootprintCodec("VAE (Oobleck)", 156_112_514, encode=644, decode=874)
T5_BASE = FootprintEncoder("text encoder (T5-base)", 109_628_544, working=22_528, tokens=128)
PROJECTION = FootprintEncoder("conditioning projection", 396_544, working=4_096, tokens=2)


def _block() -> FootprintBlock:
    kept = (
        FootprintKept("norm1 input", WIDTH, compiled=False),
        FootprintKept("x1", WIDTH, needed_by="weights"),
        *(FootprintKept(part, WIDTH) for part in ("query", "key", "value", "o1")),
        FootprintKept("attention statistics", 2 * HEADS, fp32=True),
        FootprintKept("residual after attention", WIDTH),
        FootprintKept("x2", WIDTH, needed_by="weights"),
        FootprintKept("cross query", WIDTH),
        FootprintKept("cross key", WIDTH, "text"),
        FootprintKept("cross value", WIDTH, "text"),
        FootprintKept("o2", WIDTH),
        FootprintKept("residual after cross-attention", WIDTH),
        FootprintKept("x3", WIDTH, needed_by="weights"),
        FootprintKept("value and gate", 2 * FFN),
        FootprintKept("SiLU of the gate", FFN, compiled=False),
        FootprintKept("after SwiGLU", FFN, needed_by="weights"),
    )
    linears = (
        *(FootprintLinear(f"attn1.to_{part}", WIDTH, WIDTH, "x1", "Attention", bias=False) for part in "qkv"),
        FootprintLinear("attn1.to_out.0", WIDTH, WIDTH, "o1", "Attention", bias=False),
        FootprintLinear("attn2.to_q", WIDTH, WIDTH, "x2", "Attention", bias=False),
        *(
            FootprintLinear(
                f"attn2.to_{part}", CAPTION_WIDTH, CAPTION_WIDTH, "", "Attention", "text", bias=False, backward=False
            )
            for part in "kv"
        ),
        FootprintLinear("attn2.to_out.0", WIDTH, WIDTH, "o2", "Attention", bias=False),
        FootprintLinear("ff.net.0.proj", WIDTH, 2 * FFN, "x3", "FeedForward"),
        FootprintLinear("ff.net.2", FFN, WIDTH, "after SwiGLU", "FeedForward"),
    )
    return FootprintBlock(
        "transformer_blocks.*",
        LAYERS,
        kept,
        enters=(FootprintKept("residual", WIDTH),),
        working=(FootprintKept("gradients around the feed-forward", 3 * FFN // 2),),
        linears=linears,
    )


FOOTPRINTS = (
    Footprint(
        family="stable_audio",
        flavour="open-1.0",
        denoisers=("transformer",),
        parameters=1_056_939_136,
        width=WIDTH,
        blocks=(_block(),),
        latents=AudioLatents(64, hop=2048, sample_rate=44_100, longest_seconds=2_097_152 / 44_100, prefix_tokens=1),
        codec=VAE,
        encoders=(T5_BASE, PROJECTION),
        text=FootprintText(tokens=130, cached_elements=130 * CAPTION_WIDTH + 2 * CAPTION_WIDTH),
    ),
)
