"""The names of FLUX.1 in configuration files."""

from __future__ import annotations

from gracetune.config.family_names import (
    AiToolkitNames,
    Arch,
    FamilyNames,
    Flavour,
    LoraTargets,
    ShiftPoints,
    SimpleTunerNames,
)

_ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
_CONTEXT = ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
_CONTEXT_FEED_FORWARD = ("ff_context.net.0.proj", "ff_context.net.2")
_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", *_CONTEXT_FEED_FORWARD, "proj_mlp", "proj_out")

_SIMPLETUNER = SimpleTunerNames(
    default_flavour="krea",
    untrained_flavours=("fluxbooru", "libreflux"),
    assistants={"schnell": "ostris/FLUX.1-schnell-training-adapter"},
    targets=LoraTargets(
        (*_ATTENTION, *_CONTEXT),
        option="flux_lora_target",
        groups={
            "mmdit": _ATTENTION,
            "all": (*_ATTENTION, *_CONTEXT),
            "context": _CONTEXT,
            "context+ffs": (*_CONTEXT, *_CONTEXT_FEED_FORWARD),
            "all+ffs": (*_ATTENTION, *_CONTEXT, *_FEED_FORWARD),
            "all+ffs+embedder": ("x_embedder", *_ATTENTION, *_CONTEXT, *_FEED_FORWARD),
            "ai-toolkit": (
                *(*_ATTENTION, *_CONTEXT, *_FEED_FORWARD),
                *("norm.linear", "norm1.linear", "norm1_context.linear"),
            ),
            "tiny": ("single_transformer_blocks.7.proj_out", "single_transformer_blocks.20.proj_out"),
            "nano": ("single_transformer_blocks.7.proj_out",),
        },
    ),
    guidance_option="flux_guidance_value",
    alignment=64,
    unsupported_options=(
        "flux_fast_schedule",
        "flux_guidance_mode",
        "flux_attention_masked_training",
        "t5_padding",
    ),
)

_AI_TOOLKIT = AiToolkitNames(
    archs={
        "flux": Arch(
            ("dev", "krea", "schnell"),
            switch="is_flux",
            assistant=True,
            latent_space="flux1",
            bucket_step=32,
            other_models={"flex.": "FLUX.1 weights: Flex is another model"},
            shift=ShiftPoints(),
        ),
        # ai-toolkit counts one token per latent pixel here, four times as many tokens as the model has.
        "flux_kontext": Arch(
            ("kontext",),
            references="reference_strict",
            bucket_step=16,
            shift=ShiftPoints(base_tokens=64, max_tokens=1024),
        ),
    },
    guidance_embedding="false: Flux is trained with its guidance embedding",
    blocks=("transformer_blocks", "single_transformer_blocks"),
    unguided=("schnell",),
)

NAMES = FamilyNames(
    "flux",
    (
        Flavour("dev", "black-forest-labs/FLUX.1-dev", "image"),
        Flavour("krea", "black-forest-labs/FLUX.1-Krea-dev", "image"),
        Flavour("schnell", "black-forest-labs/FLUX.1-schnell", "image"),
        Flavour("kontext", "black-forest-labs/FLUX.1-Kontext-dev", "image", edits=True),
    ),
    pipelines=("FluxPipeline", "FluxKontextPipeline"),
    objective="flow",
    routed_blocks=("transformer_blocks", "single_transformer_blocks"),
    simpletuner=_SIMPLETUNER,
    aitoolkit=_AI_TOOLKIT,
)
