"""SimpleTuner's model classes without weights: their own noise levels and losses, on given latents."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import torch
from common import stand_in_for

os.environ.setdefault("SIMPLETUNER_LOG_LEVEL", "ERROR")
stand_in_for(
    "torchaudio", "torchao", "cv2", "torchvision", "trainingsample", "wandb", "fal", "imageio", "toml", "tomli_w",
    "fastapi", "uvicorn", "pydantic_settings", "colorama", "boto3", "botocore", "webshart", "datasets", "pandas",
    "sentencepiece", "atomicwrites", "bs4", "deepspeed", "torchsde", "httpx", "librosa", "loguru", "matplotlib",
    "schedulefree", "ftfy", "aiofiles", "av", "soundfile",
)  # fmt: skip

CLASSES = {"flux": "Flux", "qwen_image": "QwenImage", "wan": "Wan", "sdxl": "SDXL"}
DEFAULTS = {
    "flow_schedule_shift": 3.0, "flow_schedule_auto_shift": False, "flow_use_beta_schedule": False,
    "flow_use_uniform_schedule": False, "flow_beta_schedule_alpha": 2.0, "flow_beta_schedule_beta": 2.0,
    "flow_sigmoid_scale": 1.0, "flow_custom_timesteps": None, "flow_cubic_schedule_weights": None,
    "flux_fast_schedule": False, "mixflow_enabled": False, "loss_type": "l2", "huber_schedule": "snr", "huber_c": 0.1,
    "snr_gamma": None, "snr_weight": 1.0, "scheduled_sampling_reflexflow": False, "timestep_bias_strategy": "none",
    "timestep_bias_portion": 0.25, "refiner_training": False,
}  # fmt: skip
"""SimpleTuner's own, of the options that the recorded code reads (a test of ours holds the ones we read against its
field registry)."""
PUBLISHED = {
    "flux": {"base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 4096, "max_shift": 1.15, "shift": 3.0,
             "use_dynamic_shifting": True},
    "wan": {},
}  # fmt: skip
"""The scheduler's configuration of the published weights, as far as a flow scheduler reads it."""


def model_of(family: str, options: dict[str, Any]) -> Any:
    """With the options of a config, after SimpleTuner's own check of them (`safety_check`)."""
    from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

    module = importlib.import_module(f"simpletuner.helpers.models.{family}.model")
    model = object.__new__(getattr(module, CLASSES[family]))
    config = {**DEFAULTS, **options}
    if config["flow_schedule_auto_shift"] and (config["flow_schedule_shift"] or 0) > 0:
        config["flow_schedule_shift"] = 0  # safety_check.py does this to every config
    model.config = SimpleNamespace(**config)
    model.accelerator = SimpleNamespace(device=torch.device("cpu"))
    model._get_dataset_timestep_sampling_offset = lambda batch: 0.0
    if family == "qwen_image":
        model.setup_training_noise_schedule()
    elif family == "sdxl":
        model.noise_schedule = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    else:
        model.noise_schedule = FlowMatchEulerDiscreteScheduler(**PUBLISHED[family])
    return model
