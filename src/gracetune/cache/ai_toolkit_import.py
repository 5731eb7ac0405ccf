"""`cache build --import-ai-toolkit`: import entries that ai-toolkit cached beside the data, before encoding the rest.

This module pairs missing entries with media files. `ai_toolkit_files` finds ai-toolkit's files for them and decides
which ones are valid.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.cache.ai_toolkit_files import ImportReport, LatentRequest, TextRequest, import_latents, import_text
from gracetune.cache.encoder import DescribesEntries, LatentEncoder, Prompt, TextEncoder
from gracetune.cache.required_entries import LatentItem, TextItem, by_folder
from gracetune.cache.store import DiskStore
from gracetune.config.families import names_of
from gracetune.config.run_config import Model
from gracetune.data.index import DataIndex
from gracetune.data.items import DatasetIndex
from gracetune.data.refs import SampleRef

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

FOLDERS = ("_latent_cache", "_t_e_cache")

StoreOf = Callable[[Path], DiskStore]


def cache_folders_found(index: DataIndex) -> list[Path]:
    """Cache folders of ai-toolkit beside the images. Their contents are not examined."""
    roots = _roots(index)
    parents = dict.fromkeys((roots[one.id] / item.path).parent for one in _datasets(index) for item in one.items)
    return [folder / name for folder in parents for name in FOLDERS if (folder / name).is_dir()]


def take_latents(
    encoder: LatentEncoder, index: DataIndex, model: Model, missing: Sequence[LatentItem], store_of: StoreOf
) -> ImportReport:
    """Import latents. `encoder` encodes a few of them again for comparison."""

    def encode(ref: SampleRef) -> Entry:
        return encoder.encode([index.load(ref)])[0]

    spaces = [arch.latent_space or name for name, arch in names_of(model.family).aitoolkit.archs.items()]
    beside = encoder.beside if isinstance(encoder, DescribesEntries) else None
    roots, reports = _roots(index), []
    for folder, items in by_folder(missing).items():
        requests = [LatentRequest(item.origin, item.ref, roots[item.ref.dataset] / item.ref.path) for item in items]
        with store_of(folder).writer() as writer:
            reports.append(import_latents(writer, requests, spaces=spaces, encode=encode, beside=beside))
    return _joined(reports)


def take_texts(
    encoder: TextEncoder, index: DataIndex, model: Model, missing: Sequence[TextItem], store_of: StoreOf
) -> ImportReport:
    """Import text embeddings. `encoder` encodes a few of them again for comparison."""
    image_of = dict(_captioned_images(index))
    reports = []
    for folder, items in by_folder(missing).items():
        requests = [
            TextRequest(item.origin, item.text, image_of[item.text], reads_images=bool(item.images))
            for item in items if item.text in image_of
        ]  # fmt: skip
        with store_of(folder).writer() as writer:
            reports.append(
                import_text(
                    writer, requests, archs=_archs(model), encode=lambda text: encoder.encode([Prompt(text)])[0]
                )
            )
    return _joined(reports)


def _archs(model: Model) -> list[str]:
    """All of ai-toolkit's names for the family. Its models usually share encoders; the comparison detects others."""
    return list(names_of(model.family).aitoolkit.archs)


def _captioned_images(index: DataIndex) -> Iterator[tuple[str, Path]]:
    """Pairs of caption and image. ai-toolkit stores one embedding file per image."""
    roots = _roots(index)
    for one in _datasets(index):
        for item in one.items:
            yield from ((caption, roots[one.id] / item.path) for caption in item.captions)


def _datasets(index: DataIndex) -> Iterator[DatasetIndex]:
    yield from index.datasets
    yield from index.held_out


def _roots(index: DataIndex) -> dict[str, Path]:
    return {one.id: Path(os.path.expanduser(index.backend_of(one.id).root)) for one in _datasets(index)}  # noqa: PTH111


def _joined(reports: Sequence[ImportReport]) -> ImportReport:
    return ImportReport(
        sum(one.imported for one in reports),
        sum(one.compared for one in reports),
        tuple(rejection for one in reports for rejection in one.rejected),
        sum(one.without_file for one in reports),
    )
