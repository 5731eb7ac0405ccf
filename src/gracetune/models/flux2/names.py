"""The names of FLUX.2 in configuration files."""

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

# SimpleTuner's klein flavours are the base weights.
_SIMPLETUNER = SimpleTunerNames(
    flavours={"klein-9b": "klein-base-9b", "klein-4b": "klein-base-4b"},
    default_flavour="klein-9b",
    targets=LoraTargets(("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj")),
    alignment=16,
)

_AI_TOOLKIT = AiToolkitNames(
    archs={
        "flux2": Arch(("dev",), references="reference_loose", bucket_step=16, shift=ShiftPoints()),
        "flux2_klein_9b": Arch(("klein-base-9b", "klein-9b"), references="reference_loose", bucket_step=16,
                               shift=ShiftPoints()),
        "flux2_klein_4b": Arch(("klein-base-4b", "klein-4b"), references="reference_loose", bucket_step=16,
                               shift=ShiftPoints()),
    },
    guidance_embedding="false: FLUX.2 dev is trained with its guidance embedding",
    blocks=("transformer_blocks", "single_transformer_blocks"),
    blocks_are_default_targets=True,
    unguided=("klein-base-9b", "klein-base-4b", "klein-9b", "klein-4b"),
)  # fmt: skip

NAMES = FamilyNames(
    "flux2",
    (
        Flavour("dev", "black-forest-labs/FLUX.2-dev", "image", edits=True, images_alone=True),
        Flavour("klein-base-9b", "black-forest-labs/FLUX.2-klein-base-9B", "image", edits=True, images_alone=True),
        Flavour("klein-base-4b", "black-forest-labs/FLUX.2-klein-base-4B", "image", edits=True, images_alone=True),
        Flavour("klein-9b", "black-forest-labs/FLUX.2-klein-9B", "image", edits=True, images_alone=True,
                distilled=True),
        Flavour("klein-4b", "black-forest-labs/FLUX.2-klein-4B", "image", edits=True, images_alone=True,
                distilled=True),
    ),
    pipelines=("Flux2Pipeline", "Flux2KleinPipeline"),
    objective="flow",
    spaces_count=True,
    simpletuner=_SIMPLETUNER,
    aitoolkit=_AI_TOOLKIT,
)  # fmt: skip
