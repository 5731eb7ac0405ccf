"""What a config needs from the machine at hand: folders that must exist, sizes that should fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath

import psutil

from gracetune.config.dataset_config import Dataset
from gracetune.config.draft import OUR_DEFAULT, Path, dotted
from gracetune.config.resolve import Resolved
from gracetune.errors import Problem
from gracetune.units import format_bytes


def path_problems(resolved: Resolved) -> list[Problem]:
    """Everything a config names on disk that is not there."""
    return [_problem(resolved, path, *rest) for path, *rest in _missing_paths(resolved)]


def size_warnings(resolved: Resolved, host_bytes: int | None = None) -> list[str]:
    """Limits this machine cannot honour. Only warnings: a config is often checked elsewhere than it runs."""
    host_bytes = psutil.virtual_memory().total if host_bytes is None else host_bytes
    return [
        f"dataset {dataset.id}: memory_limit_gb {dataset.in_memory.memory_limit_gb:g} is more than this machine's "
        f"{format_bytes(host_bytes)}; staging will stop at what the machine can spare"
        for dataset in resolved.config.datasets
        if (dataset.in_memory.memory_limit_gb or 0) * 1e9 > host_bytes
    ]


def _problem(resolved: Resolved, path: Path, found: str, expected: str, hint: str) -> Problem:
    origin = resolved.origins.get(path, OUR_DEFAULT)
    return Problem(origin.key or dotted(path), found, expected, hint, origin.where or str(resolved.file))


def _missing_paths(resolved: Resolved) -> Iterator[tuple[Path, str, str, str]]:
    config = resolved.config
    for index, dataset in enumerate(config.datasets):
        if not dataset.disabled:
            yield from _dataset_paths(dataset, ("datasets", index))
    weights: dict[Path, str | None] = {
        ("model", "path"): config.model.path,
        ("model", "vae_path"): config.model.vae_path,
        ("model", "text_encoder_path"): config.model.text_encoder_path,
        ("adapter", "init_from"): config.adapter.init_from,
    }
    for path, name in weights.items():
        if name is not None and _is_local(name) and not FilePath(name).expanduser().exists():
            yield path, f"{name}, which does not exist", "weights on this machine, or a hub id", "check the spelling"
    output = FilePath(config.output_dir).expanduser()
    if output.exists() and not output.is_dir():
        yield ("output_dir",), f"{output}, which is a file", "a folder, or nothing yet", "choose another folder"
    for index, prompt in enumerate(config.validation.prompts):
        for name in prompt.references:
            if not FilePath(name).expanduser().is_file():
                place: Path = ("validation", "prompts", index, "references")
                yield place, f"{name}, which does not exist", "a picture", "check the spelling"


def _dataset_paths(dataset: Dataset, path: Path) -> Iterator[tuple[Path, str, str, str]]:
    if dataset.type == "url" or "://" in dataset.path:
        return
    folder = FilePath(dataset.path).expanduser()
    if not folder.exists():
        yield (*path, "path"), f"{dataset.path}, which does not exist", "the dataset's folder", _near_folder(folder)
    if dataset.mask.path is not None and not FilePath(dataset.mask.path).expanduser().exists():
        yield (
            (*path, "mask", "path"),
            f"{dataset.mask.path}, which does not exist",
            "a folder of masks",
            "check the spelling",
        )
    table = dataset.captions.table
    if table is not None and not any(place.is_file() for place in (FilePath(table.path), folder / table.path)):
        yield (
            (*path, "captions", "table", "path"),
            f"{table.path}, which does not exist",
            "a table",
            "check the spelling",
        )


def _near_folder(folder: FilePath) -> str:
    known = folder
    while not known.exists() and known != known.parent:
        known = known.parent
    return f"check the spelling: {known} exists, what follows does not; or check without folders: --no-paths"


def _is_local(name: str) -> bool:
    """A path rather than a hub id (`owner/name`)."""
    return name.startswith(("/", "./", "../", "~")) or name.endswith((".safetensors", ".pt", ".ckpt")) or "\\" in name
