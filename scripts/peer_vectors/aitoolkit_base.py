"""What the recorders of ai-toolkit's data code share: its dataset, opened on a folder without a model."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from pathlib import Path
from typing import Any

from common import stand_in_for

UNUSED = (
    "torchaudio", "albumentations", "controlnet_aux", "lycoris", "bitsandbytes", "optimum", "k_diffusion", "kornia",
    "torchao", "lpips", "open_clip", "timm", "pytorch_wavelets", "dotenv", "oyaml", "flatten_json", "toml",
    "omegaconf", "prodigyopt", "diskcache", "tensorboard", "cleanfid", "slugify",
)  # fmt: skip
"""Imported by its modules; no recorded code path calls them."""


def prepare(peer: Path) -> None:
    """Model classes are imported one by one: the package around them imports every model, some of which need another
    version of diffusers."""
    stand_in_for(*UNUSED)
    for name in ("extensions_built_in", "extensions_built_in.diffusion_models"):
        package = types.ModuleType(name)
        package.__path__ = [str(peer.joinpath(*name.split(".")))]
        sys.modules[name] = package


def model(divisibility: int) -> Any:
    """What a dataset asks of the model it is for."""
    return types.SimpleNamespace(
        get_bucket_divisibility=lambda: divisibility,
        model_config=types.SimpleNamespace(latent_space_version="recorded", arch="recorded"),
        use_raw_control_images=False,
        encode_control_in_text_embeddings=False,
        text_embedding_space_version="recorded",
        te_padding_side="right",
        latent_space_version="recorded",
        vae=types.SimpleNamespace(config=types.SimpleNamespace(scale_factor_temporal=4)),
        unet=types.SimpleNamespace(config=types.SimpleNamespace()),
    )


def dataset(
    folder: Path, divisibility: int = 16, batch_size: int = 1, sd: dict[str, Any] | None = None, **options: Any
) -> Any:
    """ai-toolkit's own dataset of a folder, quietly. `sd` adds to what the model has to answer."""
    from toolkit.config_modules import DatasetConfig
    from toolkit.data_loader import AiToolkitDataset

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        config = DatasetConfig(dataset_path=str(folder), **options)
        requested = model(divisibility)
        vars(requested).update(sd or {})
        return AiToolkitDataset(config, batch_size=batch_size, sd=requested)
