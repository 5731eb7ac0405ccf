"""Serve the latents and text embeddings that ai-toolkit has cached on disk from memory.

ai-toolkit writes and names its files as usual. When the files of a dataset are complete, each is read once. From then
on the `load_file` of its two modules reads from memory. Loader processes do so too, since they are forked from this
one.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from gracetune.extension import GIB, probe

from .hooks import Around, Function, argument
from .options import Caches
from .points import CACHE_LATENTS, CACHE_TEXT, READ_LATENT, READ_TEXT, Point
from .resident import Budget, ResidentFiles

if TYPE_CHECKING:
    from gracetune.extension import ManagedHeap

TEXT_PATHS: Final = (
    "_text_embedding_path", "_blank_text_embedding_path", "_dop_text_embedding_path",
    "_dop_blank_text_embedding_path", "_dopsd_text_embedding_path", "_dopsd_blank_text_embedding_path",
)  # fmt: skip
"""Attributes of a file item with the paths of its text embeddings; older versions have the first only."""


class CacheFeature:
    def __init__(
        self,
        requested: Caches,
        workers: int,
        report: Callable[[str], None],
        managed: Callable[[], ManagedHeap | str] | None = None,
    ) -> None:
        self._requested, self._workers, self._report, self._managed = requested, workers, report, managed
        self._latents: ResidentFiles | None = None
        self._text: ResidentFiles | None = None
        self._unserved = ""

    def open(self, process: Any) -> None:
        requested, device = self._requested, process.device_torch
        if self._workers and multiprocessing.get_start_method() != "fork":
            self._unserved = "loader processes are not forked here, so they read from disk"
            self._report(f"caches: {self._unserved}; `num_workers: 0` serves from memory")
        limit = None if requested.limit_gib is None else int(requested.limit_gib * GIB)
        budget = Budget(probe(), limit)
        index = (device.index or 0) if device.type == "cuda" else None

        def files(role: Any, place: str) -> ResidentFiles:
            found = ResidentFiles(role, place == "unified_memory", budget, self._report, index)
            if self._managed is not None:
                found.heap = self._managed()
            return found

        if requested.latents != "disk":
            self._latents = files("latent_cache", requested.latents)
        if requested.text != "disk":
            self._text = files("text_cache", requested.text)

    def hooks(self) -> list[tuple[Point, Around]]:
        wanted: list[tuple[Point, Around]] = []
        if self._latents is not None:
            wanted += [
                (CACHE_LATENTS, _after(self._latents, _latent_files)),
                (READ_LATENT, _answering(self._latents)),
            ]
        if self._text is not None:
            wanted += [(CACHE_TEXT, _after(self._text, _text_files)), (READ_TEXT, _answering(self._text))]
        return wanted

    def report(self) -> dict[str, Any]:
        return {
            name: _report(files, self._workers, self._unserved)
            for name, files in (("latents", self._latents), ("text", self._text))
            if files is not None
        }

    def close(self) -> None:
        for files in (self._latents, self._text):
            if files is not None:
                files.close()


def _report(files: ResidentFiles, workers: int, unserved: str) -> dict[str, Any]:
    counts: dict[str, Any] = asdict(files.counts)
    notes = list(files.notes)
    if workers:
        counts |= {"hits": None, "disk_reads": None}
        notes.append(f"reads are not counted: {workers} loader processes make them")
    if unserved:
        notes.append(unserved)
    if not files.counts.files:
        notes.append("nothing was cached, so nothing was served")
    return {**counts, "notes": notes}


def _after(files: ResidentFiles, named: Callable[[Any], Iterator[str]]) -> Around:
    """A hook that loads a dataset's files into memory once all are cached."""

    def around(original: Function, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        files.add(named(args[0]))
        return result

    return around


def _latent_files(dataset: Any) -> Iterator[str]:
    for item in dataset.file_list:
        yield item.get_latent_path()


def _text_files(dataset: Any) -> Iterator[str]:
    for item in dataset.file_list:
        yield item.get_text_embedding_path()
        yield from (path for name in TEXT_PATHS if (path := vars(item).get(name)) is not None)


def _answering(files: ResidentFiles) -> Around:
    """A hook for `load_file` that reads from memory."""

    def around(original: Function, *args: Any, **kwargs: Any) -> Any:
        file = argument(original, "filename", args, kwargs)
        return files.find(str(file), lambda: original(*args, **kwargs))

    return around
