"""The names of Wan 2.1 and 2.2 in configuration files."""

from __future__ import annotations

from gracetune.config.family_names import (
    AiToolkitNames,
    Arch,
    ClipLength,
    FamilyNames,
    Flavour,
    LoraTargets,
    SimpleTunerNames,
)

_SIMPLETUNER = SimpleTunerNames(
    flavours={
        "t2v-480p-1.3b-2.1": "t2v-1.3b-2.1",
        "t2v-480p-14b-2.1": "t2v-14b-2.1",
        "i2v-14b-2.1": "i2v-14b-480p-2.1",
        "i2v-14b-2.1-720p": "i2v-14b-720p-2.1",
    },
    default_flavour="t2v-480p-1.3b-2.1",
    untrained_flavours=(
        "animegen-t2v-high",
        "animegen-t2v-low",
        "flf2v-14b-2.1",
        "flf2v-14b-2.2-high",
        "flf2v-14b-2.2-low",
        "vace-1.3b-2.1",
        "vace-14b-2.1",
    ),
    forced_expert_shifts={"i2v-14b-2.2": 5.0},
    flavours_without_shift=("t2v-14b-2.2",),  # SimpleTuner has no such flavour and therefore no default for it
    targets=LoraTargets(("to_k", "to_q", "to_v", "to_out.0")),
    clips=ClipLength(fps=15, seconds=5, frame_step=8),
    alignment=32,
    alignments={"ti2v-5b-2.2": 64},
    unsupported_options=(
        "t5_padding",
        "wan_force_2_1_time_embedding",
    ),
)

_SHIFT_21, _SHIFT_22 = 3.0, 5.0
# Chosen so that the lowest of 1000 noise levels is 0.001 shifted twice, as in ai-toolkit.
_TERMINAL_21, _TERMINAL_22 = 0.0059, 0.0195
# Only for I2V. T2V's weights switch at 0.875 themselves.
_BOUNDARY_NOTE = (
    "the experts meet at 0.9, where these weights switch; ai-toolkit trains the high-noise expert down to 0.875 and "
    "the low-noise expert up to there. To do the same: --set model.expert_boundary=0.875"
)

_AI_TOOLKIT = AiToolkitNames(
    archs={
        "wan21": Arch(
            ("t2v-1.3b-2.1", "t2v-14b-2.1"),
            tags={"1b": "t2v-1.3b-2.1", "14b": "t2v-14b-2.1"},
            shift=_SHIFT_21,
            shift_terminal=_TERMINAL_21,
            bucket_step=16,
        ),
        "wan21_i2v": Arch(
            ("i2v-14b-480p-2.1", "i2v-14b-720p-2.1"),
            starts_from_image="always",
            tags={"14b480p": "i2v-14b-480p-2.1", "14b": "i2v-14b-720p-2.1"},
            shift=_SHIFT_21,
            shift_terminal=_TERMINAL_21,
            bucket_step=16,
        ),
        "wan22_14b": Arch(("t2v-14b-2.2",), shift=_SHIFT_22, shift_terminal=_TERMINAL_22, bucket_step=16),
        "wan22_14b_i2v": Arch(
            ("i2v-14b-2.2",),
            starts_from_image="always",
            shift=_SHIFT_22,
            shift_terminal=_TERMINAL_22,
            boundary_note=_BOUNDARY_NOTE,
            bucket_step=16,
        ),
        "wan22_5b": Arch(
            ("ti2v-5b-2.2",),
            starts_from_image="do_i2v",
            shift=_SHIFT_22,
            shift_terminal=_TERMINAL_22,
            bucket_step=32,
        ),
    },
    blocks=("blocks",),
    blocks_are_default_targets=True,
    text_encoder_qtype="qtype",  # ai-toolkit quantizes the denoiser and text encoder of Wan alike
)

NAMES = FamilyNames(
    "wan",
    (
        Flavour("t2v-14b-2.2", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "video", dual_expert=True),
        Flavour("i2v-14b-2.2", "Wan-AI/Wan2.2-I2V-A14B-Diffusers", "video", dual_expert=True, from_image=True),
        Flavour("ti2v-5b-2.2", "Wan-AI/Wan2.2-TI2V-5B-Diffusers", "video"),
        Flavour("t2v-1.3b-2.1", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "video"),
        Flavour("t2v-14b-2.1", "Wan-AI/Wan2.1-T2V-14B-Diffusers", "video"),
        Flavour("i2v-14b-480p-2.1", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "video", from_image=True),
        Flavour("i2v-14b-720p-2.1", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", "video", from_image=True),
    ),
    pipelines=("WanPipeline", "WanImageToVideoPipeline"),
    objective="flow",
    routed_blocks=("blocks",),
    simpletuner=_SIMPLETUNER,
    aitoolkit=_AI_TOOLKIT,
)
