"""Numbers recorded from the peers' own code (`scripts/peer_vectors`), and configs of the peers to compare with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gracetune.config import Environment, Resolved, load
from gracetune.config.dataset_config import Dataset
from gracetune.config.run_config import RunConfig
from gracetune.data.geometry import Geometry
from gracetune.data.index import NO_CAPTION, Appearance, DataIndex
from gracetune.data.index_builder import build_index
from gracetune.data.items import DatasetIndex, sort_into_buckets
from gracetune.data.loader import Loader
from gracetune.data.media.probe import ImageFacts
from gracetune.data.refs import BatchRef
from gracetune.data.scan import MediaFile
from gracetune.models.registry import geometry_of
from unit.config import aitoolkit_jobs, simpletuner_files

FOLDER = Path(__file__).parents[2] / "golden" / "fidelity"
ARCHS = {
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "flux": "black-forest-labs/FLUX.1-dev",
    "flux_kontext": "black-forest-labs/FLUX.1-Kontext-dev",
    "qwen_image": "Qwen/Qwen-Image",
    "qwen_image_edit": "Qwen/Qwen-Image-Edit",
    "qwen_image_edit_plus": "Qwen/Qwen-Image-Edit-2509",
    "wan21": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "wan22_14b": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "wan22_14b_i2v": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    "wan22_5b": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
}
MODELS = {
    "flux": ("flux", "dev"),
    "sdxl": ("sdxl", "base-1.0"),
    "qwen_image": ("qwen_image", "v1.0"),
    "wan 1.3b": ("wan", "t2v-480p-1.3b-2.1"),
    "wan 14b": ("wan", "t2v-480p-14b-2.1"),
    "wan 5b": ("wan", "ti2v-5b-2.2"),
}
"""SimpleTuner's family and flavour."""


def recorded(peer: str, topic: str) -> Any:
    return json.loads((FOLDER / peer / f"{topic}.json").read_text(encoding="utf-8"))["values"]


def aitoolkit(tmp_path: Path, arch: str = "flux", *, datasets: list[dict[str, Any]], **sections: Any) -> Resolved:
    """A job of ai-toolkit with these datasets."""
    given = [{"folder_path": str(tmp_path), **one} for one in datasets]
    if arch.endswith(("kontext", "edit", "edit_plus")):
        given = [{"control_path": str(tmp_path), **one} for one in given]
    model = {"name_or_path": ARCHS[arch], "arch": arch}
    train = {"noise_scheduler": "ddpm" if arch == "sdxl" else "flowmatch", **sections.pop("train", {})}
    job = aitoolkit_jobs.job(model=model, datasets=given, train=train, **sections)
    return load(aitoolkit_jobs.write(tmp_path, job), environment=Environment({}))


def simpletuner(tmp_path: Path, model: str = "flux", *, datasets: list[dict[str, Any]], **options: Any) -> Resolved:
    """A SimpleTuner config with these entries of `multidatabackend.json`."""
    family, flavour = MODELS[model]
    entries = [
        {"id": f"d{number}", "type": "local", "instance_data_dir": str(tmp_path), **one}
        for number, one in enumerate(datasets)
    ]
    changes = {"model_family": family, "model_flavour": flavour, **options}
    return simpletuner_files.resolve(tmp_path, changes, datasets=entries)


def geometry(config: RunConfig) -> Geometry:
    return geometry_of(config.model)[0]


def placed(config: RunConfig, sizes: list[list[int]]) -> dict[tuple[int, int], tuple[int, ...]]:
    """What a run makes of images of these sizes: scaled width and height, left, top, width and height of the crop.

    Images that are left out are missing.
    """
    dataset, requested = config.datasets[0], geometry(config)
    files = [MediaFile(f"{w}x{h}.png", 1, f"{w}x{h}", ImageFacts(w, h, has_alpha=False)) for w, h in sizes]
    items, _ = sort_into_buckets(files, dataset, requested, config.training.seed)
    index = index_of(dataset, requested, config.training.seed, items)
    found = {}
    for item in items:
        fit = index.describe(index.datasets[0], item, Appearance(0, 0), NO_CAPTION).fit
        assert fit is not None
        found[item.size] = (*fit.resized, fit.left, fit.top, item.bucket.width, item.bucket.height)
    return found


def index_of(dataset: Dataset, requested: Geometry, seed: int, items: list[Any]) -> DataIndex:
    return DataIndex(seed, requested, (DatasetIndex(0, dataset, tuple(items)),), (), {})


def values(config: RunConfig, count: int) -> list[BatchRef]:
    """The first batches of a run, whose files are looked at as a run does it."""
    index = build_index(config, geometry(config))
    loader = Loader(index, batch_size=config.training.batch_size)
    found: list[BatchRef] = []
    while len(found) < count:
        outcome = loader.next_batch(step=len(found) // config.training.gradient_accumulation_steps)
        if isinstance(outcome, BatchRef):
            found.append(outcome)
    return found
