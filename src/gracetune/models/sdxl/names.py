"""The names of SDXL in configuration files."""

from __future__ import annotations

from gracetune.config.family_names import (
    AiToolkitNames,
    Arch,
    DefaultVae,
    FamilyNames,
    Flavour,
    LoraTargets,
    SimpleTunerNames,
)

_SIMPLETUNER = SimpleTunerNames(
    default_flavour="base-1.0",
    untrained_flavours=("refiner-1.0", "base-0.9", "refiner-0.9"),
    targets=LoraTargets(("to_k", "to_q", "to_v", "to_out.0")),
    vae=DefaultVae("madebyollin/sdxl-vae-fp16-fix", mark="sdxl-vae", title="an SDXL VAE"),
    alignment=64,
    unsupported_options=(
        "urepa_enabled",
        "diff2flow_enabled",
        "snr_weight",
        "rescale_betas_zero_snr",
        "refiner_training",
        "sdxl_refiner_uses_full_range",
        "timestep_bias_strategy",
        "pretrained_unet_model_name_or_path",
        "pretrained_unet_subfolder",
    ),
)

NAMES = FamilyNames(
    "sdxl",
    (Flavour("base-1.0", "stabilityai/stable-diffusion-xl-base-1.0", "image"),),
    pipelines=("StableDiffusionXLPipeline",),
    objective="ddpm",
    explicit_sizes=True,
    lora_format="kohya",  # ComfyUI and diffusers both load it
    simpletuner=_SIMPLETUNER,
    aitoolkit=AiToolkitNames(
        archs={"sdxl": Arch(("base-1.0",), switch="is_xl", bucket_step=16)},
        unet=True,
        blocks=("attentions",),
        conv_blocks=("resnets", "downsamplers", "upsamplers"),
    ),
)
