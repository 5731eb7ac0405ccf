"""Checks of a config against this machine: paths that must exist, and sizes that should fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath

from gracetune.config.dataset_config import Dataset
from gracetune.config.draft import OUR_DEFAULT, Path, dotted
from gracetune.config.path_status import PathStatus, inspect_path
from gracetune.config.registry import reads_key
from gracetune.config.resolve import Resolved
from gracetune.errors import Problem
from gracetune.units import format_bytes

CHECK = "check the spelling"
Wrong = tuple[Path, str, str, str]
"""Path of the value, found, expected, hint."""


def path_problems(resolved: Resolved) -> list[Problem]:
    """Return a problem for every file or folder that a config names and that is missing or of the wrong kind."""
    return [problem for _, problem in named_path_problems(resolved)]


def named_path_problems(resolved: Resolved) -> list[tuple[str, Problem]]:
    """Like `path_problems`, with gracetune's own key beside each problem, which has the key as the file writes it."""
    return [(dotted(path), _problem(resolved, path, *rest)) for path, *rest in _wrong_paths(resolved)]


def limits_memory(resolved: Resolved) -> bool:
    """Whether the config has any limit that `size_warnings` checks."""
    return any(dataset.in_memory.memory_limit_gb for dataset in resolved.config.datasets)


def size_warnings(resolved: Resolved, host_bytes: int | None) -> list[str]:
    """Return a warning for each memory limit that is more than this machine has.

    These are not errors, because a config is often checked on another machine than it runs on. `host_bytes` is the main
    memory that a process can use here, without GPU memory; None if unknown.
    """
    if host_bytes is None:
        return []
    return [
        f"dataset {dataset.id}: memory_limit_gb {dataset.in_memory.memory_limit_gb:g} is more than the "
        f"{format_bytes(host_bytes)} a run may use here; staging will stop at what the machine can spare"
        for dataset in resolved.config.datasets
        if (dataset.in_memory.memory_limit_gb or 0) * 1e9 > host_bytes
    ]


def _problem(resolved: Resolved, path: Path, found: str, expected: str, hint: str) -> Problem:
    origin = resolved.origins.get(path, OUR_DEFAULT)
    return Problem(origin.key or dotted(path), found, expected, hint, origin.location or str(resolved.file))


def _wrong_paths(resolved: Resolved) -> Iterator[Wrong]:
    config = resolved.config
    for index, dataset in enumerate(config.datasets):
        if not dataset.disabled:
            yield from _dataset_paths(dataset, ("datasets", index))
    weights: dict[Path, str | None] = {
        ("model", "path"): config.model.path,
        ("model", "vae_path"): config.model.vae_path,
        ("model", "text_encoder_path"): config.model.text_encoder_path,
        ("model", "assistant_adapter"): config.model.assistant_adapter,
        ("adapter", "init_from"): config.adapter.init_from,
    }
    for path, name in weights.items():
        if name is not None and _is_local(name):
            yield from _unless(("file", "folder"), path, name, "weights on this machine, or a hub id")
    if reads_key(config.optimizer.name, "rates_from") and config.optimizer.rates_from is not None:
        expected = "the optimizer.pt of an ai-toolkit run"
        yield from _unless(("file",), ("optimizer", "rates_from"), config.optimizer.rates_from, expected)
    yield from _unless(
        ("folder", "nothing"), ("output_dir",), config.output_dir, "a folder, or nothing yet", "choose another folder"
    )
    for index, prompt in enumerate(config.validation.prompts):
        for name in prompt.references:
            yield from _unless(("file",), ("validation", "prompts", index, "references"), name, "an image file")


def _unless(kinds: tuple[str, ...], path: Path, name: str, expected: str, hint: str = CHECK) -> Iterator[Wrong]:
    status = inspect_path(name)
    if status.kind not in kinds:
        missing = status.kind == "nothing" and hint == CHECK
        yield path, f"{name}, {status.words}", expected, f"{hint}: {missing_part(status)}" if missing else hint


def _dataset_paths(dataset: Dataset, path: Path) -> Iterator[Wrong]:
    if not dataset.reads_folder or "://" in dataset.path:
        return
    folder = inspect_path(dataset.path)
    if folder.kind == "file" and dataset.has_local_copy:
        return
    if folder.kind != "folder":
        yield (*path, "path"), f"{dataset.path}, {folder.words}", "the dataset's folder", _folder_hint(folder)
    if dataset.mask.path is not None:
        yield from _unless(("folder", "file"), (*path, "mask", "path"), dataset.mask.path, "a folder of masks")
    table = dataset.captions.table
    if table is not None and not dataset.has_local_copy and inspect_path(table.path, below=folder.path).kind != "file":
        yield from _unless(("file",), (*path, "captions", "table", "path"), table.path, "a table")


def _folder_hint(folder: PathStatus) -> str:
    if folder.kind == "file":
        return f"name the folder the file lies in: {folder.path.parent}"
    if folder.kind == "unreachable":
        return "check the path; or check without folders: --no-paths"
    return f"{CHECK}: {missing_part(folder)}; or check without folders: --no-paths"


def missing_part(status: PathStatus) -> str:
    """Describe the first missing component of a path, and the folder that lacks it."""
    missing = status.path
    while missing.parent != missing and inspect_path(missing.parent).kind == "nothing":
        missing = missing.parent
    relative = missing.parent == FilePath()
    return f"there is no `{missing.name or missing}` in {'the working folder' if relative else missing.parent}"


def _is_local(name: str) -> bool:
    """Whether a name is certainly a path, and not a hub id (`owner/name`)."""
    return name.startswith(("/", "./", "../", "~")) or name.endswith((".safetensors", ".pt", ".ckpt")) or "\\" in name
