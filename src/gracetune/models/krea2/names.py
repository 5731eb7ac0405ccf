"""The names of Krea 2 in configuration files."""

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

_SHIFT = ShiftPoints(max_tokens=6400)

_SIMPLETUNER = SimpleTunerNames(
    default_flavour="raw",
    targets=LoraTargets(("to_k", "to_q", "to_v", "to_out.0")),
    auto_shift=_SHIFT,
    alignment=64,
    guidance_without=1.0,
    guided_above=0.0,
    unsupported_options=("krea2_reference_latents",),
)

_AI_TOOLKIT = AiToolkitNames(
    archs={
        "krea2": Arch(("raw", "turbo"), tags={"turbo": "turbo"}, assistant=True, shift=_SHIFT, bucket_step=16),
    },
    # ai-toolkit looks for `blocks` anywhere in a path, which the text fusion's blocks have in theirs.
    blocks=("transformer_blocks", "text_fusion.layerwise_blocks", "text_fusion.refiner_blocks"),
)

NAMES = FamilyNames(
    "krea2",
    (
        Flavour("raw", "krea/Krea-2-Raw", "image"),
        Flavour("turbo", "krea/Krea-2-Turbo", "image", distilled=True),
    ),
    pipelines=("Krea2Pipeline",),
    objective="flow",
    spaces_count=True,
    simpletuner=_SIMPLETUNER,
    aitoolkit=_AI_TOOLKIT,
)
