"""Datasets of type `in_memory`: staged once in main memory for all local ranks, and read by upstream as local files.

Upstream sees such a dataset as a `local` one. Listing, order and errors are upstream's own, so a run gets the same
samples in the same order; only the bytes come from memory. Files that were not staged (links out of the folder, unknown
extensions) are read from disk and counted. Files that upstream writes go to disk and are read from there.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gracetune.extension import ConfigError, Dataset, InMemoryBackend, LocalRanks, Problem, Storage, open_backend
from gracetune_simpletuner import telling
from gracetune_simpletuner.errors import stopping
from gracetune_simpletuner.hooks import Around, check_reads
from gracetune_simpletuner.overlay import Overlay
from gracetune_simpletuner.points import hooks_of
from gracetune_simpletuner.telemetry import Counts

_KINDS = ("image", "video", "audio", "conditioning", "eval")
_UPSTREAMS_OWN = ("aspect_ratio_bucket_indices", "aspect_ratio_bucket_metadata")
"""Upstream's index files beside the data. One rank writes them while others read, so they are read from disk."""


@dataclass
class Staged:
    """The staged files of one dataset, by upstream's paths."""

    id: str
    root: str
    backend: Storage
    counts: Counts
    files: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._roots = tuple(dict.fromkeys((os.path.abspath(self.root), os.path.realpath(self.root))))  # noqa: PTH100
        self.files = {path for path in self.backend.survey().files if not _is_upstreams(path)}

    def relative(self, path: str | os.PathLike[str]) -> str | None:
        """The staged file for a path; None if it is not staged."""
        absolute = os.path.abspath(os.fspath(path))  # noqa: PTH100 - does not resolve links
        for root in self._roots:
            if absolute.startswith(f"{root}/"):
                inside = absolute[len(root) + 1 :]
                return inside if inside in self.files else None
        return None

    def read(self, inside: str) -> bytes:
        found = bytes(self.backend.read(inside))
        self.counts.add("reads_from_memory")
        self.counts.add("read_bytes", len(found))
        return found

    def forget(self, path: str) -> None:
        inside = self.relative(path)
        if inside is not None:
            self.files.discard(inside)


@dataclass
class StagedDatasets:
    """All staged datasets, by id."""

    overlay: Overlay
    blocks: dict[str, Dataset] = field(default_factory=dict)
    """Requested datasets, staged when upstream builds them."""
    staged: dict[str, Staged] = field(default_factory=dict)

    def open(self, dataset_id: str) -> Staged | None:
        """The staged dataset; the first call stages it. None for datasets of other types."""
        dataset = self.blocks.get(dataset_id)
        if dataset is None:
            return None
        if dataset_id not in self.staged:
            self.staged[dataset_id] = self._stage(dataset)
        return self.staged[dataset_id]

    def _stage(self, dataset: Dataset) -> Staged:
        launch, telemetry = self.overlay.launch, self.overlay.telemetry
        ranks = None
        if launch.local_count > 1:
            ranks = LocalRanks(launch.local_rank, launch.local_count, f"{self.overlay.output_dir}\0{launch.key}")
        backend = open_backend(dataset, ranks=ranks)
        self.overlay.at_end.append(backend.close)
        report = backend.report if isinstance(backend, InMemoryBackend) else None
        staged = Staged(dataset.id, dataset.path, backend, telemetry.of("in_memory"))
        details: dict[str, Any] = {"dataset": dataset.id, "files": len(staged.files)}
        if isinstance(backend, InMemoryBackend):
            details["stored_bytes"] = backend.stored
        if report is not None:
            details |= {"raw_bytes": report.raw, "seconds_s": round(report.seconds, 3), "lines": report.lines()}
        self.overlay.note(f"{dataset.id}: {len(staged.files)} files staged in memory", event="staged", **details)
        return staged

    def find(self, path: Any) -> tuple[Staged, str] | None:
        if not isinstance(path, str | os.PathLike):
            return None
        for staged in self.staged.values():
            inside = staged.relative(path)
            if inside is not None:
                return staged, inside
        return None


def take_datasets(overlay: Overlay, datasets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Attach the feature if a dataset is `in_memory`, and return the list with `local` in its place."""
    blocks, problems = {}, []
    for entry in datasets:
        if entry.get("type") != "in_memory" or entry.get("disabled") or entry.get("disable"):
            continue
        found = _dataset(entry)
        if isinstance(found, Dataset):
            blocks[found.id] = found
        else:
            problems += found
    if problems:
        raise ConfigError(problems)
    if not blocks:
        return datasets
    overlay.start_telling()
    telling.activate(overlay)
    overlay.activate("in_memory", _wrappers(StagedDatasets(overlay, blocks)))
    return [
        {key: value for key, value in entry.items() if key != "in_memory"} | {"type": "local"}
        if entry.get("type") == "in_memory"
        else entry
        for entry in datasets
    ]


def _dataset(entry: Mapping[str, Any]) -> Dataset | list[Problem]:
    name = str(entry.get("id", "?"))
    folder = entry.get("instance_data_dir", entry.get("instance_data_root"))
    kind = entry.get("dataset_type", "image")
    problems = []
    if not isinstance(folder, str) or not folder:
        problems.append(Problem(f"{name}.instance_data_dir", repr(folder), "a folder", '"instance_data_dir": "photos"'))
    elif not Path(folder).expanduser().is_dir():
        problems.append(Problem(f"{name}.instance_data_dir", folder, "a folder that exists", "check the spelling"))
    if kind not in _KINDS:
        hint = 'only datasets with media are staged; for caches write "type": "local" and use cache_config'
        problems.append(Problem(f"{name}.dataset_type", str(kind), f"one of {', '.join(_KINDS)}", hint))
    block = entry.get("in_memory") or {}
    if problems:
        return problems
    try:
        fields = {"id": name, "path": folder, "type": "in_memory", "dataset_type": kind, "in_memory": _plain(block)}
        return Dataset.model_validate(fields)
    except ValidationError as error:
        return [
            Problem(
                f"{name}.{'.'.join(map(str, one['loc']))}",
                repr(one["input"]),
                one["msg"],
                "compression, num_workers, memory_limit_gb and file_extensions are known: see docs/data.md",
            )
            for one in error.errors()
        ]


def _plain(block: Any) -> Any:
    if not isinstance(block, Mapping):
        return block
    values = {key: value for key, value in block.items() if value is not None}
    if isinstance(values.get("compression"), str):
        values["compression"] = values["compression"].strip().lower()
    if isinstance(values.get("file_extensions"), list):
        values["file_extensions"] = tuple(values["file_extensions"])
    if isinstance(values.get("memory_limit_gb"), int) and not isinstance(values["memory_limit_gb"], bool):
        values["memory_limit_gb"] = float(values["memory_limit_gb"])
    return values


def _is_upstreams(path: str) -> bool:
    return path.rpartition("/")[2].startswith(_UPSTREAMS_OWN)


# -- the wrappers ------------------------------------------------------------------------------------------------------


def _wrappers(datasets: StagedDatasets) -> dict[str, Around]:
    backends: tuple[Around, ...] = (_create_backend, _from_representation)
    loaders: tuple[Around, ...] = (_load_image, _load_by_path, _load_by_path, _load_by_path)
    names = [hook.target for hook in hooks_of("in_memory")]
    return {name: partial(one, datasets) for name, one in zip(names, backends + loaders, strict=True)}


def _create_backend(datasets: StagedDatasets, original: Any, builder: Any, config: Any, *rest: Any, **more: Any) -> Any:
    plain = original(builder, config, *rest, **more)
    with stopping():
        check_reads("BaseBackendConfig", config)
        staged = datasets.open(str(config.id))
    return plain if staged is None else reading_from(staged, plain)


def _from_representation(datasets: StagedDatasets, original: Any, representation: Any, *rest: Any, **more: Any) -> Any:
    """A forked worker has the staged pages already."""
    plain = original(representation, *rest, **more)
    staged = datasets.staged.get(str(representation.get("id")))
    return plain if staged is None else reading_from(staged, plain)


def _load_image(datasets: StagedDatasets, original: Any, source: Any, *rest: Any, **more: Any) -> Any:
    found = datasets.find(source)
    return original(source if found is None else found[0].read(found[1]), *rest, **more)


def _load_by_path(datasets: StagedDatasets, original: Any, source: Any, *rest: Any, **more: Any) -> Any:
    """Video and audio decoders need a path, and may pass it to another program."""
    found = datasets.find(source)
    if found is None:
        return original(source, *rest, **more)
    with memory_path(found[0].read(found[1]), Path(source).name) as path:
        return original(path, *rest, **more)


@contextmanager
def memory_path(content: bytes, name: str) -> Iterator[str]:
    """A path to a file in memory. Other processes of the same user can open it too."""
    with io.FileIO(os.memfd_create(name, os.MFD_CLOEXEC), "r+") as file:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) or 0 :]
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def reading_from(staged: Staged, plain: Any) -> Any:
    """Change the class of upstream's backend object to one that reads from memory first."""
    plain.__class__ = _staged_class(type(plain))
    plain.gracetune_staged = staged
    return plain


def _staged_class(base: type[Any]) -> type[Any]:
    class StagedDataBackend(base):  # type: ignore[misc]
        """Reads the files in `gracetune_staged` from memory; everything else is upstream's."""

        gracetune_staged: Staged

        def read(self, filepath: Any, as_byteIO: bool = False, *rest: Any, **more: Any) -> Any:  # noqa: N803
            inside = self.gracetune_staged.relative(filepath)
            if inside is None:
                self.gracetune_staged.counts.add("reads_from_disk")
                return super().read(filepath, as_byteIO, *rest, **more)
            found = self.gracetune_staged.read(inside)
            return io.BytesIO(found) if as_byteIO else found

        def exists(self, filepath: Any, *rest: Any, **more: Any) -> Any:
            known = filepath is not None and self.gracetune_staged.relative(filepath) is not None
            return known or super().exists(filepath, *rest, **more)

        def open_file(self, filepath: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            inside = self.gracetune_staged.relative(filepath) if set(mode) <= set("rbt") else None
            if inside is None:
                return super().open_file(filepath, mode, *rest, **more)
            stream = io.BytesIO(self.gracetune_staged.read(inside))
            return stream if "b" in mode else io.TextIOWrapper(stream)

        def write(self, filepath: Any, *rest: Any, **more: Any) -> Any:
            self.gracetune_staged.forget(filepath)
            return super().write(filepath, *rest, **more)

        def delete(self, filepath: Any, *rest: Any, **more: Any) -> Any:
            self.gracetune_staged.forget(filepath)
            return super().delete(filepath, *rest, **more)

    StagedDataBackend.__name__ = StagedDataBackend.__qualname__ = f"Staged{base.__name__}"
    return StagedDataBackend
