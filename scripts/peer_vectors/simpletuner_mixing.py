"""How SimpleTuner mixes datasets and makes up batches, and which videos it takes how many frames of."""

from __future__ import annotations

import contextlib
import random
import types
from collections import Counter
from pathlib import Path
from typing import Any

from common import record
from simpletuner_base import prepare, set_dataset, set_options


class Length:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def sampler_length(images: int, batch_size: int, repeats: int) -> int:
    from simpletuner.helpers.multiaspect.sampler import MultiAspectSampler

    set_dataset("d", repeats=repeats)
    metadata = types.SimpleNamespace(aspect_ratio_bucket_indices={"1.0": [f"{n}.png" for n in range(images)]})
    this = types.SimpleNamespace(id="d", batch_size=batch_size, metadata_backend=metadata)
    return int(MultiAspectSampler.__len__(this))


def weights(datasets: list[dict[str, Any]], sampling: str) -> list[float]:
    """The share of batches each dataset has, in percent of all."""
    from simpletuner.helpers.data_backend.runtime.dataloader_iterator import get_backend_weight
    from simpletuner.helpers.training.state_tracker import StateTracker

    set_options(data_backend_sampling=sampling)
    StateTracker.data_backends.clear()
    lengths = [sampler_length(one["images"], one["batch_size"], one["repeats"]) for one in datasets]
    StateTracker.data_backends.clear()
    for number, (one, length) in enumerate(zip(datasets, lengths, strict=True)):
        config = set_dataset(f"d{number}", probability=one["probability"], repeats=one["repeats"], dataset_type="image")
        StateTracker.data_backends[f"d{number}"].update(sampler=Length(length), dataset_type="image", config=config)
    found = [get_backend_weight(f"d{number}", None, 1) for number in range(len(datasets))]
    return [weight / sum(found) for weight in found]


def sliders() -> list[str]:
    """The order in which datasets with slider strengths are taken."""
    from simpletuner.helpers.data_backend.runtime import dataloader_iterator as iterator
    from simpletuner.helpers.training.state_tracker import StateTracker

    set_options()
    StateTracker.data_backends.clear()
    backends = {}
    for name, strength in (("down", -1.0), ("plain", None), ("up", 1.0)):
        config = set_dataset(name, probability=1.0, dataset_type="image")
        if strength is not None:
            config["slider_strength"] = strength
        StateTracker.data_backends[name].update(sampler=Length(5), dataset_type="image", config=config)
        backends[name] = config
    sampler = iterator._get_scaled_sampler(backends)
    return [sampler.next_backend_id(step, backends) for step in range(9)]


def batches(images: dict[str, str], batch_size: int) -> list[list[str]]:
    """One epoch of its sampler: images by name and bucket -> every batch, sorted."""
    from simpletuner.helpers.multiaspect.sampler import MultiAspectSampler
    from simpletuner.helpers.training.exceptions import MultiDatasetExhausted

    set_options()
    set_dataset("d", caption_strategy="filename")
    buckets: dict[str, list[str]] = {}
    for image, bucket in images.items():
        buckets.setdefault(bucket, []).append(f"/data/{image}.png")
    seen: Counter[str] = Counter()
    metadata = types.SimpleNamespace(
        aspect_ratio_bucket_indices=buckets, instance_data_dir="/data", seen_images=seen,
        get_metadata_by_filepath=lambda path: {"crop_coordinates": (0, 0)},
        is_seen=lambda image, occurrence=0: seen[image] > occurrence,
        mark_batch_as_seen=seen.update, reset_seen_images=seen.clear,
    )  # fmt: skip
    this = object.__new__(MultiAspectSampler)
    this.__dict__.update(
        id="d", metadata_backend=metadata, batch_size=batch_size, buckets=[*buckets], exhausted_buckets=[],
        current_bucket=None, current_epoch=1, sample_type_strs="images", sample_type_str="image", rank_info="",
        caption_strategy="filename", use_captions=True, prepend_instance_prompt=False, instance_prompt=None,
        disable_multiline_split=False, data_backend=types.SimpleNamespace(id="d"), batch_accumulator=[],
        debug_log=lambda text: None, connect_conditioning_samples=lambda samples: samples,
        connect_s2v_samples=lambda samples: samples, logger=types.SimpleNamespace(warning=lambda *a: None),
    )  # fmt: skip
    found = []
    with contextlib.suppress(MultiDatasetExhausted):
        for batch in this:
            found.append(sorted(Path(one["image_path"]).stem for one in batch))  # noqa: PERF401
    return found


def frames() -> list[dict[str, Any]]:
    """Frames of a video that are trained on, or 0 where it is left out."""
    from simpletuner.helpers.data_backend.dataset_types import DatasetType
    from simpletuner.helpers.metadata.backends.base import MetadataBackend
    from simpletuner.helpers.models.registry import ModelRegistry
    from simpletuner.helpers.models.wan.model import Wan
    from simpletuner.helpers.training.state_tracker import StateTracker

    set_options(model_family="wan")
    StateTracker.get_model_family = classmethod(lambda cls: "wan")
    ModelRegistry.model_families = classmethod(lambda cls: {"wan": Wan})
    cases = []
    for video in ({"num_frames": 81}, {"num_frames": 81, "min_frames": 33}, {"num_frames": 33, "max_frames": 100}):
        minimum = Wan.adjust_video_frames(video.get("min_frames", video["num_frames"]))
        this = types.SimpleNamespace(
            id="d", dataset_config={}, dataset_type=DatasetType.VIDEO, minimum_num_frames=minimum,
            maximum_num_frames=video.get("max_frames"), minimum_image_size=None, resolution_type="pixel",
        )  # fmt: skip
        taken = {}
        for length in (16, 33, 40, 57, 80, 81, 84, 90, 100, 101, 120):
            about = {"original_size": (832, 480), "num_frames": length}
            kept = MetadataBackend.meets_resolution_requirements(this, image_metadata=about)
            taken[length] = min(about["num_frames"], Wan.adjust_video_frames(video["num_frames"])) if kept else 0
        cases.append({"video": video, "taken": taken})
    return cases


def values(_peer: Path) -> Any:
    prepare()
    random.seed(0)
    pair = [
        {"images": 30, "batch_size": 2, "repeats": 0, "probability": 1.0},
        {"images": 10, "batch_size": 2, "repeats": 2, "probability": 0.5},
    ]
    own = [pair[0], {"images": 40, "batch_size": 4, "repeats": 0, "probability": 1.0}]
    return {
        "weights": [
            {"datasets": datasets, "sampling": sampling, "shares": weights(datasets, sampling)}
            for datasets in (pair, own) for sampling in ("auto-weighting", "uniform")
        ],
        "sliders": sliders(),
        "batch_size": 4,
        "batches": batches({"a": "1.0", **dict.fromkeys("bcd", "0.5"), **dict.fromkeys("efghi", "2.0")}, 4),
        "frames": frames(),
    }  # fmt: skip


if __name__ == "__main__":
    record("mixing", values)
