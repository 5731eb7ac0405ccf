"""What configuration files call SDXL."""

from __future__ import annotations

from gracetune.config.family_names import (
    AiToolkitNames,
    Arch,
    DefaultVae,
    FamilyNames,
    Flavour,
    LoraTargets,
    RefusedOption,
    SimpleTunerNames,
)

_WEIGHTS = "a part of the model from elsewhere is not supported: one model, with an optional VAE and text encoder"
_REFINER = "the refiner is not supported"

_SIMPLETUNER = SimpleTunerNames(
    default_flavour="base-1.0",
    untrained_flavours=("refiner-1.0", "base-0.9", "refiner-0.9"),
    targets=LoraTargets(("to_k", "to_q", "to_v", "to_out.0")),
    vae=DefaultVae("madebyollin/sdxl-vae-fp16-fix", mark="sdxl-vae", title="an SDXL VAE"),
    refused=(
        RefusedOption("urepa_enabled", False, "this auxiliary loss is not implemented"),
        RefusedOption("diff2flow_enabled", False, "the diffusion-to-flow bridge is not implemented"),
        RefusedOption("snr_weight", 1.0, "the loss is not scaled"),
        RefusedOption("rescale_betas_zero_snr", False, "zero-terminal-SNR schedules are not implemented"),
        RefusedOption("refiner_training", False, _REFINER),
        RefusedOption("sdxl_refiner_uses_full_range", False, _REFINER),
        RefusedOption("timestep_bias_strategy", None, "this bias over timesteps is not implemented"),
        RefusedOption("pretrained_unet_model_name_or_path", None, _WEIGHTS, same_as="pretrained_model_name_or_path"),
        RefusedOption("pretrained_unet_subfolder", "unet", _WEIGHTS),
    ),
)

NAMES = FamilyNames(
    "sdxl",
    (Flavour("base-1.0", "stabilityai/stable-diffusion-xl-base-1.0", "image"),),
    objective="ddpm",
    simpletuner=_SIMPLETUNER,
    aitoolkit=AiToolkitNames(archs={"sdxl": Arch(("base-1.0",), switch="is_xl")}, unet=True),
)
