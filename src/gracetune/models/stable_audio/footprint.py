"""Stable Audio Open's memory footprint. Dimensions are those of the config published with the weights.

The saved tensors are those of diffusers' `StableAudioDiTBlock`: self-attention, cross-attention, SwiGLU.
"""

from __future__ import annotations

from gracetune.models.footprint import AudioLatents, Block, Codec, Encoder, Footprint, Kept, Linear, Text

WIDTH, FFN, HEADS, LAYERS = 1536, 6_144, 24, 24
CAPTION_WIDTH = 768
VAE = Codec("VAE (Oobleck)", 156_112_514, encode=644, decode=874)
T5_BASE = Encoder("text encoder (T5-base)", 109_628_544, working=22_528, tokens=128)
PROJECTION = Encoder("conditioning projection", 396_544, working=4_096, tokens=2)


def _block() -> Block:
    kept = (
        Kept("norm1 input", WIDTH, compiled=False),
        Kept("x1", WIDTH, needed_by="weights"),
        *(Kept(part, WIDTH) for part in ("query", "key", "value", "o1")),
        Kept("attention statistics", 2 * HEADS, fp32=True),
        Kept("residual after attention", WIDTH),
        Kept("x2", WIDTH, needed_by="weights"),
        Kept("cross query", WIDTH),
        Kept("cross key", WIDTH, "text"),
        Kept("cross value", WIDTH, "text"),
        Kept("o2", WIDTH),
        Kept("residual after cross-attention", WIDTH),
        Kept("x3", WIDTH, needed_by="weights"),
        Kept("value and gate", 2 * FFN),
        Kept("SiLU of the gate", FFN, compiled=False),
        Kept("after SwiGLU", FFN, needed_by="weights"),
    )
    linears = (
        *(Linear(f"attn1.to_{part}", WIDTH, WIDTH, "x1", "Attention", bias=False) for part in "qkv"),
        Linear("attn1.to_out.0", WIDTH, WIDTH, "o1", "Attention", bias=False),
        Linear("attn2.to_q", WIDTH, WIDTH, "x2", "Attention", bias=False),
        *(
            Linear(
                f"attn2.to_{part}", CAPTION_WIDTH, CAPTION_WIDTH, "", "Attention", "text", bias=False, backward=False
            )
            for part in "kv"
        ),
        Linear("attn2.to_out.0", WIDTH, WIDTH, "o2", "Attention", bias=False),
        Linear("ff.net.0.proj", WIDTH, 2 * FFN, "x3", "FeedForward"),
        Linear("ff.net.2", FFN, WIDTH, "after SwiGLU", "FeedForward"),
    )
    return Block(
        "transformer_blocks.*",
        LAYERS,
        kept,
        enters=(Kept("residual", WIDTH),),
        working=(Kept("gradients around the feed-forward", 3 * FFN // 2),),
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
        text=Text(tokens=130, cached_elements=130 * CAPTION_WIDTH + 2 * CAPTION_WIDTH),
    ),
)
