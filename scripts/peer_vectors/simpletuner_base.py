"""What the recorders of SimpleTuner's data code share: its global state, set up for one dataset without a model."""

from __future__ import annotations

import logging
import tempfile
import types
from typing import Any

from common import stand_in_for

UNUSED = (
    "torchaudio", "wandb", "torchao", "optimum", "bitsandbytes", "deepspeed", "lycoris", "compel", "toml", "pillow_jxl",
    "boto3", "botocore", "fastapi", "uvicorn", "starlette", "sqlalchemy", "regex", "imageio", "open_clip", "torchsde",
    "aiosqlite", "loguru", "pytorch_optimizer", "pandas", "httpx", "multipart", "jinja2", "webshart", "librosa",
    "soundfile", "ftfy", "einops", "datasets", "pydantic_settings", "sse_starlette", "apscheduler", "aiohttp",
    "atomicwrites",
)  # fmt: skip
"""Imported by its modules; no recorded code path calls them."""

OPTIONS = {
    "aspect_bucket_alignment": 64, "aspect_bucket_rounding": 2, "caption_dropout_probability": 0.0, "controlnet": False,
    "data_backend_sampling": "auto-weighting", "framerate": None, "model_family": "flux", "model_flavour": None,
    "resolution": 1024, "resolution_type": "pixel_area", "seed": 42, "gradient_accumulation_steps": 1,
    "print_sampler_statistics": False, "allow_dataset_oversubscription": False, "disable_bucket_pruning": False,
    "minimum_image_size": None, "maximum_image_size": None, "target_downsample_size": None,
}  # fmt: skip


def prepare() -> None:
    stand_in_for(*UNUSED)
    logging.disable(logging.CRITICAL)


def set_options(**changed: Any) -> None:
    from simpletuner.helpers.training.state_tracker import StateTracker

    folder = tempfile.gettempdir()  # it keeps a table of resolutions there
    StateTracker.set_args(types.SimpleNamespace(**{**OPTIONS, "output_dir": folder, **changed}))
    StateTracker.set_model(None)


def set_dataset(name: str, **entry: Any) -> dict[str, Any]:
    """A dataset as `multidatabackend.json` has it, converted as the factory does it."""
    from simpletuner.helpers.data_backend.factory import FactoryRegistry
    from simpletuner.helpers.training.state_tracker import StateTracker

    entry = {"id": name, "type": "local", **entry}
    factory = types.SimpleNamespace(args=StateTracker.get_args())
    FactoryRegistry._handle_resolution_conversion(factory, entry)
    entry.setdefault("resolution_type", StateTracker.get_args().resolution_type)
    entry.setdefault("resolution", StateTracker.get_args().resolution)
    StateTracker.data_backends[name] = {"config": entry, "id": name}
    return entry
