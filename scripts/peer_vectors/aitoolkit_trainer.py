"""ai-toolkit's trainer without a model: its own timestep sampling, loss and optimizer step, on given latents."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import torch
from common import stand_in_for

stand_in_for(
    "torchaudio", "torchao", "cv2", "torchvision", "albumentations", "dotenv", "oyaml", "flatten_json", "open_clip",
    "lpips", "controlnet_aux", "pytorch_wavelets", "timm", "librosa", "av", "soundfile", "k_diffusion", "toml",
    "optimum", "bitsandbytes", "prodigyopt", "omegaconf", "kornia", "diskcache", "slugify",
)  # fmt: skip


class Timer:
    def __call__(self, name: str) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def start(self, name: str) -> None: ...

    def stop(self, name: str) -> None: ...


class BatchOf:
    """What the trainer reads of a batch: latents, and that nothing else is in it."""

    def __init__(self, latents: torch.Tensor, count: int | None = None) -> None:
        """`count`: as if there were so many samples, where only the size of latents is read."""
        count = count or len(latents)
        self.latents = latents
        self.file_items = [None] * count
        self.loss_multiplier_list = [1.0] * count
        self.tensor = self.mask_tensor = self.control_tensor = self.sigmas = None
        self.unconditional_tensor = self.unconditional_latents = None
        self.audio_pred = self.audio_target = None

    def get_caption_list(self) -> list[str]:
        return [""] * len(self.file_items)

    def get_is_reg_list(self) -> list[bool]:
        return [False] * len(self.file_items)


_EXTENSIONS = {
    "flux_kontext": ("flux_kontext", "FluxKontextModel"),
    "qwen_image": ("qwen_image", "QwenImageModel"),
    "qwen_image_edit": ("qwen_image", "QwenImageEditModel"),
    "qwen_image_edit_plus": ("qwen_image", "QwenImageEditPlusModel"),
    "wan22_5b": ("wan22", "Wan225bModel"),
    "wan22_14b": ("wan22", "Wan2214bModel"),
    "wan22_14b_i2v": ("wan22", "Wan2214bI2VModel"),
}


def model_class(arch: str) -> Any:
    """As `get_model_class`, without importing the models of every other arch."""
    from toolkit.models.wan21 import Wan21, Wan21I2V
    from toolkit.stable_diffusion_model import StableDiffusion

    if arch not in _EXTENSIONS:
        return {"wan21": Wan21, "wan21_i2v": Wan21I2V}.get(arch, StableDiffusion)
    package = "extensions_built_in.diffusion_models"
    if package not in sys.modules:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(Path(path) / "diffusion_models") for path in _extensions_folder()]
    module, name = _EXTENSIONS[arch]
    found = getattr(importlib.import_module(f"{package}.{module}"), name)
    assert found.arch == arch, f"{name} is {found.arch}"
    return found


def _extensions_folder() -> list[str]:
    import extensions_built_in

    return list(extensions_built_in.__path__)


def patch_size_of(arch: str) -> Any:
    """The transformer's own `patch_size`, as its class has it by default; the published weights have the same."""
    import inspect

    from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, WanTransformer3DModel

    kind = {"flux": FluxTransformer2DModel, "qwen": QwenImageTransformer2DModel, "wan2": WanTransformer3DModel}
    return inspect.signature(kind[arch[:4]].__init__).parameters["patch_size"].default


def trainer_for(arch: str, train: dict[str, Any], model: dict[str, Any] | None = None) -> Any:
    """An SDTrainer with the arch's own scheduler and no weights."""
    from extensions_built_in.sd_trainer.SDTrainer import SDTrainer
    from toolkit.config_modules import ModelConfig, TrainConfig
    from toolkit.sampler import get_sampler

    trainer = object.__new__(SDTrainer)
    trainer.train_config = TrainConfig(**{"noise_scheduler": "flowmatch", "dtype": "fp32", **train})
    trainer.model_config = ModelConfig(name_or_path="none", arch=arch, dtype="fp32", **(model or {}))
    kind = model_class(arch)
    if hasattr(kind, "get_train_scheduler"):
        scheduler = kind.get_train_scheduler()
    else:
        prediction = "v_prediction" if trainer.model_config.is_v_pred else "epsilon"
        family = "flux" if trainer.model_config.is_flux else "sd"
        scheduler = get_sampler(trainer.train_config.noise_scheduler, {"prediction_type": prediction}, arch=family)
    trainer.sd = kind("cpu", trainer.model_config, dtype="fp32", noise_scheduler=scheduler)
    trainer.sd.noise_scheduler = scheduler
    if arch != "sdxl":
        config = type("Config", (), {"patch_size": patch_size_of(arch)})
        trainer.sd.model = trainer.sd.unet = type("Transformer", (), {"config": config})
    trainer.timer = Timer()
    trainer.embedding = trainer.adapter = trainer.trigger_word = trainer.dfe = None
    trainer.current_boundary_index = trainer.steps_this_boundary = 0
    trainer.additional_logs = {}
    trainer.device_torch = torch.device("cpu")
    return trainer
