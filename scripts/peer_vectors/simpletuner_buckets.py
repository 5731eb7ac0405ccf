"""Buckets, scaling, crops and SDXL's time ids of SimpleTuner, and which images its size limits leave out.

Of each image: the size it is scaled to, the bucket, and the corner of the crop (top, left). A few cases are tried with
real pixels too (`broken`): there an image comes out in another size than its bucket, or squeezed.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases import SIZES
from common import record
from simpletuner_base import prepare, set_dataset, set_options


class Lenient(types.SimpleNamespace):
    """Options of a config; what is not there is None."""

    def __getattr__(self, name: str) -> Any:
        return None


def alignments() -> dict[str, int]:
    """What each model class makes of `aspect_bucket_alignment`, by flavour."""
    from simpletuner.helpers.models.flux.model import Flux
    from simpletuner.helpers.models.qwen_image.model import QwenImage
    from simpletuner.helpers.models.sdxl.model import SDXL
    from simpletuner.helpers.models.wan.model import Wan

    requested = {
        "flux": (Flux, "dev"), "sdxl": (SDXL, "base-1.0"), "qwen_image": (QwenImage, "v1.0"),
        "wan 1.3b": (Wan, "t2v-480p-1.3b-2.1"), "wan 14b": (Wan, "t2v-480p-14b-2.1"), "wan 5b": (Wan, "ti2v-5b-2.2"),
    }  # fmt: skip
    found = {}
    for name, (model, flavour) in requested.items():
        config = Lenient(
            aspect_bucket_alignment=8, model_flavour=flavour, validation_num_inference_steps=40, lora_type="standard",
            base_model_precision="no_change", model_type="lora", validation_guidance=1.0, train_batch_size=1,
            flux_lora_target="all", prediction_type=None, flow_schedule_shift=3.0, controlnet=False,
            model_family=name.partition(" ")[0],
        )  # fmt: skip
        this = object.__new__(model)
        this.__dict__.update(
            config=config, accelerator=Lenient(), pipelines={}, assistant_lora_loaded=False, model=None
        )  # fmt: skip
        try:
            this.check_user_config()
        except (AttributeError, TypeError, ValueError) as error:
            if config.aspect_bucket_alignment == 8:
                raise SystemExit(f"{name}: {error}") from error
        found[name] = config.aspect_bucket_alignment
    return found


def prepared(size: tuple[int, int], image: Any = None) -> Any:
    from simpletuner.helpers.image_manipulation.training_sample import TrainingSample
    from simpletuner.helpers.training.state_tracker import StateTracker

    StateTracker.aspect_resolution_map = {}  # whatever images came before
    about = {"original_size": size}
    return TrainingSample(image=image, data_backend_id="d", image_metadata=about, model=None).prepare()


def written(box: Sequence[float]) -> str:
    return " ".join(str(int(one)) for one in box)


def boxes(alignment: int, rounding: int = 2, **entry: Any) -> list[str]:
    set_options(aspect_bucket_alignment=alignment, aspect_bucket_rounding=rounding)
    set_dataset("d", **entry)
    found = []
    for size in SIZES:
        sample = prepared(size)
        scaled, bucket = (list(map(int, one)) for one in (sample.intermediary_size, sample.target_size))
        box = [*scaled, *bucket]
        found.append(written([*box, *map(int, sample.crop_coordinates)]))
    return found


def buckets() -> list[dict[str, Any]]:
    """Area, edge and megapixels, at the alignments of our families."""
    entries: list[dict[str, Any]] = [
        {"resolution": 1024, "resolution_type": "pixel_area"}, {"resolution": 512, "resolution_type": "pixel_area"},
        {"resolution": 768, "resolution_type": "pixel_area"}, {"resolution": 1024, "resolution_type": "pixel"},
        {"resolution": 480, "resolution_type": "pixel"},
        *({"resolution": size, "resolution_type": "area"} for size in (0.25, 0.5, 1.0, 2.0, 0.75)),
    ]  # fmt: skip
    cropped = [
        {"resolution": 1024, "resolution_type": "pixel_area", "crop": True, "crop_aspect": "square"},
        {"resolution": 1024, "resolution_type": "pixel_area", "crop": True, "crop_aspect": "preserve"},
        {"resolution": 1024, "resolution_type": "pixel_area", "crop": True, "crop_aspect": "closest",
         "crop_aspect_buckets": [1.0, 1.5, 0.67]},
        {"resolution": 512, "resolution_type": "pixel", "crop": True, "crop_aspect": "square"},
    ]  # fmt: skip
    found = []
    for alignment in (32, 64):
        for entry in (*entries, *cropped):
            entry = {**entry, "crop_style": "center"}
            found.append({"alignment": alignment, "entry": entry, "boxes": boxes(alignment, **entry)})
    entry = {"resolution": 1024, "resolution_type": "pixel_area", "crop_style": "center"}
    found.append({"alignment": 64, "rounding": 3, "entry": entry, "boxes": boxes(64, 3, **entry)})
    corner = {**entry, "crop": True, "crop_aspect": "square", "crop_style": "corner"}
    found.append({"alignment": 64, "entry": corner, "boxes": boxes(64, **corner)})
    return found


def downsampled() -> list[dict[str, Any]]:
    """The size an image is scaled to before it is cropped, with `maximum_image_size` and `target_downsample_size`."""
    from simpletuner.helpers.image_manipulation.training_sample import TrainingSample

    found = []
    for kind, maximum, target in (("pixel_area", 2048, 1536), ("pixel", 2048, 1536), ("area", 4.0, 2.0)):
        entry: dict[str, Any] = {
            "resolution": 1.0 if kind == "area" else 1024, "resolution_type": kind, "crop": True,
            "crop_aspect": "square", "crop_style": "center", "maximum_image_size": maximum,
            "target_downsample_size": target,
        }  # fmt: skip
        given = dict(entry)
        set_options()
        set_dataset("d", **entry)
        sizes = []
        for size in SIZES:
            sample = TrainingSample(image=None, data_backend_id="d", image_metadata={"original_size": size}, model=None)
            sample.calculate_target_size()
            sample._downsample_before_crop()
            sizes.append(written([*sample.current_size, *sample.target_size]))
        found.append({"entry": given, "boxes": sizes})
    return found


def left_out() -> list[dict[str, Any]]:
    """Which of the sizes meet `minimum_image_size`."""
    from simpletuner.helpers.data_backend.dataset_types import DatasetType
    from simpletuner.helpers.metadata.backends.base import MetadataBackend

    found = []
    for entry in (
        {"resolution": 1024, "resolution_type": "pixel_area", "minimum_image_size": 700},
        {"resolution": 1024, "resolution_type": "pixel", "minimum_image_size": 700},
        {"resolution": 1.0, "resolution_type": "area", "minimum_image_size": 0.5},
        {"resolution": 1024, "resolution_type": "pixel_area", "minimum_image_size": 700, "crop": True},
    ):  # fmt: skip
        set_options()
        config = set_dataset("d", **entry)
        this = types.SimpleNamespace(
            id="d", dataset_config=config, dataset_type=DatasetType.IMAGE, minimum_num_frames=None,
            maximum_num_frames=None, minimum_image_size=config["minimum_image_size"],
            resolution_type=config["resolution_type"],
        )  # fmt: skip
        kept = [
            bool(MetadataBackend.meets_resolution_requirements(this, image_metadata={"original_size": size}))
            for size in SIZES
        ]
        found.append({"entry": entry, "kept": kept})
    return found


def broken() -> list[dict[str, Any]]:
    """Cases whose pixels come out in another size than the bucket, or squeezed: tried with real images."""
    from PIL import Image

    found = []
    for entry in (
        {"resolution": 0.5, "resolution_type": "area", "crop": True, "crop_aspect": "square", "crop_style": "center"},
        {"resolution": 1.0, "resolution_type": "area", "crop": True, "crop_aspect": "square", "crop_style": "center"},
    ):
        for alignment in (32, 64):
            set_options(aspect_bucket_alignment=alignment)
            set_dataset("d", **entry)
            for size in ((1600, 900), (600, 900)):
                sample = prepared(size, Image.new("RGB", size))
                found.append({
                    "alignment": alignment, "entry": entry, "size": size, "bucket": list(sample.target_size),
                    "scaled": list(sample.intermediary_size), "came_out": list(sample.image.size),
                })  # fmt: skip
    return found


def time_ids() -> list[dict[str, Any]]:
    import torch
    from simpletuner.helpers.training.collate import gather_conditional_sdxl_size_features

    entry = {"resolution": 1024, "resolution_type": "pixel_area", "crop_style": "center"}
    set_options()
    set_dataset("d", **entry)
    found = []
    for size in SIZES[:20]:
        sample = prepared(size)
        width, height = sample.target_size
        for dropped in (False, True):
            example = {
                "intermediary_size": sample.intermediary_size, "crop_coordinates": sample.crop_coordinates,
                "drop_conditioning": dropped,
            }  # fmt: skip
            latents = torch.zeros(1, 4, height // 8, width // 8)
            ids = gather_conditional_sdxl_size_features([example], latents, torch.float32)
            found.append({"size": size, "dropped": dropped, "time_ids": ids[0, 0].tolist()})
    return found


def values(_peer: Path) -> Any:
    prepare()
    return {
        "alignments": alignments(), "sizes": SIZES, "buckets": buckets(), "downsampled": downsampled(),
        "left_out": left_out(), "broken": broken(), "time_ids_entry": {"resolution": 1024, "crop_style": "center"},
        "time_ids": time_ids(),
    }  # fmt: skip


if __name__ == "__main__":
    record("buckets", values)
