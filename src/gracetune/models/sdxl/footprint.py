"""SDXL's memory footprint. Dimensions are those of the config published with the weights.

A U-Net works at several resolutions, so blocks are counted per latent pixel: a transformer block at the middle level
sees a quarter of the pixels, one at the lowest a sixteenth. A convolution saves its input even if its weights are
frozen (autograd saves both operands), and so do the norms and activations before it.
"""

from __future__ import annotations

from fractions import Fraction

from gracetune.models.footprint import (
    Footprint,
    FootprintBlock,
    FootprintCodec,
    FootprintEncoder,
    FootprintKept,
    FootprintLinear,
    FootprintText,
    NeededBy,
    PixelLatents,
)

CAPTION_WIDTH = 2048
TIME_WIDTH = 1280
# `encode` and `decode`: elements alive at the peak of a pass, per pixel. `working`: bytes per token.
VAE = FootprintCodec("VAE (SDXL)", 83_653_863, encode=643, decode=769, element_bytes=4)
CLIP_L = FootprintEncoder("text encoder (CLIP-L)", 123_060_480, working=24_576, tokens=77, works_while_sampling=False)
CLIP_G = FootprintEncoder(
    "text encoder (CLIP-bigG)", 694_659_840, working=40_960, tokens=77, works_while_sampling=False
)
TOP, MIDDLE, BOTTOM = Fraction(1), Fraction(1, 4), Fraction(1, 16)

# (channels in, channels out, level), in forward order. Nothing before the first attention is saved unless something of
# it is trained.
_BEFORE_ATTENTION = ((320, 320, TOP), (320, 320, TOP), (320, 640, MIDDLE))
_RESNETS = (
    (640, 640, MIDDLE), (640, 1280, BOTTOM), (1280, 1280, BOTTOM), (1280, 1280, BOTTOM), (1280, 1280, BOTTOM),
    (2560, 1280, BOTTOM), (2560, 1280, BOTTOM), (1920, 1280, BOTTOM), (1920, 640, MIDDLE), (1280, 640, MIDDLE),
    (960, 640, MIDDLE), (960, 320, TOP), (640, 320, TOP), (640, 320, TOP),
)  # fmt: skip


def _conv(name: str, inputs: int, outputs: int, reads: str, owner: str, size: int = 3) -> FootprintLinear:
    return FootprintLinear(
        name, inputs, outputs, reads, owner, default=False, conv_default=True, kernel=(size, size)
    )  # fmt: skip


def _resnet(inputs: int, outputs: int, level: Fraction, *, first: bool = False) -> FootprintBlock:
    """Norm, SiLU and convolution, twice; each saves its input. `first`: before all attention."""
    needed_by: NeededBy = "block" if first else "graph"
    upper, lower = "norm, SiLU and convolution inputs", "the same of the second half"
    kept = (
        FootprintKept(upper, 3 * inputs, needed_by=needed_by),
        FootprintKept(lower, 3 * outputs, needed_by=needed_by),
    )
    enters = (FootprintKept("features", inputs, needed_by=needed_by),)
    owner = "ResnetBlock2D"
    # One row per sample. Counted as the caption's 77 rows, which is still negligible.
    time = FootprintLinear("time_emb_proj", TIME_WIDTH, outputs, "", owner, "text", default=False, conv_default=True)
    linears = [_conv("conv1", inputs, outputs, upper, owner), time, _conv("conv2", outputs, outputs, lower, owner)]
    if inputs != outputs:
        linears.append(_conv("conv_shortcut", inputs, outputs, "", owner, size=1))
    working = (FootprintKept("gradients", 2 * max(inputs, outputs)),)
    return FootprintBlock("resnets.*", 1, kept, enters, working, tuple(linears), tokens=level)


def _sampler(name: str, owner: str, channels: int, level: Fraction, *, first: bool = False) -> FootprintBlock:
    """The convolution of one change of level. `_resampling` counts its input, unless it precedes all attention."""
    kept = (FootprintKept("features", channels, needed_by="block"),) if first else ()
    return FootprintBlock(name, 1, kept, kept, (), (_conv("conv", channels, channels, "", owner),), tokens=level)


def _resampling() -> FootprintBlock:
    """Inputs of the convolutions that change the level, and of the output layers (norm, SiLU, convolution)."""
    kept = (
        FootprintKept("down", 640 // 4),
        FootprintKept("up to the middle", 1280 // 4),
        FootprintKept("up to the top", 640),
        FootprintKept("output layers", 3 * 320),
    )
    return FootprintBlock("resamplers", 1, kept, kept, (FootprintKept("gradients", 640),))


def _around_transformers(channels: int, count: int, level: Fraction) -> FootprintBlock:
    entry = (FootprintKept("norm input", channels),)
    names = ("proj_in", "proj_out")
    read = tuple(FootprintKept(f"{name} input", channels, needed_by="weights") for name in names)
    linears = tuple(
        FootprintLinear(
            f"attentions.*.{name}", channels, channels, f"{name} input", "Transformer2DModel", default=False
        )
        for name in names
    )
    return FootprintBlock("transformers", count, (*entry, *read), entry, (), linears, tokens=level)


def _transformer_block(width: int, count: int, level: Fraction) -> FootprintBlock:
    """Self-attention, cross-attention and a GEGLU feed-forward."""
    ffn, heads = 4 * width, width // 64
    kept = (
        FootprintKept("norm1 input", width, compiled=False),
        FootprintKept("x1", width, needed_by="weights"),
        *(FootprintKept(part, width) for part in ("query", "key", "value", "o1")),
        FootprintKept("attention statistics", 2 * heads, fp32=True),
        FootprintKept("residual after attention", width),
        FootprintKept("x2", width, needed_by="weights"),
        FootprintKept("cross query", width),
        FootprintKept("cross key", width, "text"),
        FootprintKept("cross value", width, "text"),
        FootprintKept("o2", width),
        FootprintKept("residual after cross-attention", width),
        FootprintKept("x3", width, needed_by="weights"),
        FootprintKept("value and gate", 2 * ffn),
        FootprintKept("GELU of the gate", ffn, compiled=False),
        FootprintKept("after GEGLU", ffn, needed_by="weights"),
    )
    linears = (
        *(FootprintLinear(f"attn1.to_{part}", width, width, "x1", "Attention", bias=False) for part in "qkv"),
        FootprintLinear("attn1.to_out.0", width, width, "o1", "Attention"),
        FootprintLinear("attn2.to_q", width, width, "x2", "Attention", bias=False),
        *(
            FootprintLinear(
                f"attn2.to_{part}", CAPTION_WIDTH, width, "", "Attention", "text", bias=False, backward=False
            )
            for part in "kv"
        ),
        FootprintLinear("attn2.to_out.0", width, width, "o2", "Attention"),
        FootprintLinear("ff.net.0.proj", width, 2 * ffn, "x3", "FeedForward"),
        FootprintLinear("ff.net.2", ffn, width, "after GEGLU", "FeedForward"),
    )
    enters, working = (
        (FootprintKept("residual", width),),
        (FootprintKept("gradients around the feed-forward", 3 * ffn // 2),),
    )
    name = "attentions.*.transformer_blocks.*"
    return FootprintBlock(name, count, kept, enters, working, linears, tokens=level)


FOOTPRINTS = (
    Footprint(
        family="sdxl",
        flavour="base-1.0",
        denoisers=("U-Net",),
        parameters=2_567_463_684,
        width=320,
        blocks=(
            *(_resnet(*resnet, first=True) for resnet in _BEFORE_ATTENTION),
            *(_resnet(*resnet) for resnet in _RESNETS),
            _resampling(),
            _sampler("downsamplers.0", "Downsample2D", 320, TOP, first=True),
            _sampler("downsamplers.0", "Downsample2D", 640, MIDDLE),
            _sampler("upsamplers.0", "Upsample2D", 1280, MIDDLE),
            _sampler("upsamplers.0", "Upsample2D", 640, TOP),
            _around_transformers(640, 5, MIDDLE),
            _around_transformers(1280, 6, BOTTOM),
            _transformer_block(640, 10, MIDDLE),
            _transformer_block(1280, 60, BOTTOM),
        ),
        latents=PixelLatents(4, patch=1),
        codec=VAE,
        encoders=(CLIP_L, CLIP_G),
        text=FootprintText(tokens=77, cached_elements=77 * CAPTION_WIDTH + 1280),
        measured="one H200: 1024x1024, LoRA (docs/performance.md)",
    ),
)
