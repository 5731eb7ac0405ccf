"""The names of Qwen-Image and Qwen-Image-Edit in configuration files."""

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

_SHIFT = ShiftPoints(max_tokens=8192, max=0.9)
_TERMINAL = 0.02

_SIMPLETUNER = SimpleTunerNames(
    flavours={
        "v1.0": "t2i",
        "v2.0": "t2i-2512",
        "edit-v1": "edit",
        "edit-v2": "edit-2509",
        "edit-v2+": "edit-2509",
        "edit-v3": "edit-2511",
    },
    default_flavour="v2.1",
    untrained_flavours=("v2.1",),
    targets=LoraTargets(("to_k", "to_q", "to_v", "to_out.0")),
    text_encoder_option="qwen_text_encoder_model_name_or_path",
    auto_shift=_SHIFT,
    alignment=32,
    free_alignment=True,
)

_AI_TOOLKIT = AiToolkitNames(
    archs={
        "qwen_image": Arch(
            ("t2i", "t2i-2512"), tags={"2512": "t2i-2512"}, shift=_SHIFT, shift_terminal=_TERMINAL, bucket_step=32
        ),
        "qwen_image_edit": Arch(
            ("edit",), references="reference_strict", shift=_SHIFT, shift_terminal=_TERMINAL, bucket_step=32
        ),
        "qwen_image_edit_plus": Arch(
            ("edit-2509", "edit-2511"),
            references="reference_loose",
            tags={"2509": "edit-2509", "2511": "edit-2511"},
            shift=_SHIFT,
            shift_terminal=_TERMINAL,
            bucket_step=32,
        ),
    },
    blocks=("transformer_blocks",),
)

NAMES = FamilyNames(
    "qwen_image",
    (
        Flavour("t2i", "Qwen/Qwen-Image", "image"),
        Flavour("t2i-2512", "Qwen/Qwen-Image-2512", "image"),
        Flavour("edit", "Qwen/Qwen-Image-Edit", "image", edits=True),
        Flavour("edit-2509", "Qwen/Qwen-Image-Edit-2509", "image", edits=True),
        Flavour("edit-2511", "Qwen/Qwen-Image-Edit-2511", "image", edits=True),
    ),
    pipelines=("QwenImagePipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline"),
    objective="flow",
    spaces_count=True,
    routed_blocks=("transformer_blocks",),
    simpletuner=_SIMPLETUNER,
    aitoolkit=_AI_TOOLKIT,
)
