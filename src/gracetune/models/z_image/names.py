"""The names of Z-Image in configuration files."""

from __future__ import annotations

from gracetune.config.family_names import (
    AiToolkitNames,
    Arch,
    FamilyNames,
    Flavour,
    LoraTargets,
    SimpleTunerNames,
)

_ASSISTANT = "hf://ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_{}.safetensors"
"""The de-distillation adapters that both peers train Turbo with."""

_SIMPLETUNER = SimpleTunerNames(
    flavours={"turbo-ostris-v2": "turbo"},
    default_flavour="turbo-ostris-v2",
    untrained_flavours=("ostris-de-turbo",),
    assistants={"turbo": _ASSISTANT.format("v1"), "turbo-ostris-v2": _ASSISTANT.format("v2")},
    targets=LoraTargets(("to_k", "to_q", "to_v", "to_out.0")),
    alignment=64,
    guidance_without=1.0,
)

_AI_TOOLKIT = AiToolkitNames(
    archs={
        "zimage": Arch(
            ("base", "turbo"),
            tags={"turbo": "turbo"},
            assistant=True,
            shift=3.0,
            bucket_step=16,
            other_models={"z-image-de-turbo": "Z-Image or Z-Image-Turbo: De-Turbo is a transformer without its model"},
        ),
    },
    blocks=("layers",),
)

NAMES = FamilyNames(
    "z_image",
    (
        Flavour("base", "Tongyi-MAI/Z-Image", "image"),
        Flavour("turbo", "Tongyi-MAI/Z-Image-Turbo", "image", distilled=True),
    ),
    pipelines=("ZImagePipeline",),
    objective="flow",
    spaces_count=True,
    simpletuner=_SIMPLETUNER,
    aitoolkit=_AI_TOOLKIT,
)
