"""Building a `DataIndex` from a config. Every folder is scanned once, and notes report what the user should know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gracetune.config.dataset_config import Dataset
from gracetune.config.run_config import RunConfig
from gracetune.data.backend import Backend, LeftOut
from gracetune.data.backends.errors import problem_text
from gracetune.data.backends.open import open_unstaged
from gracetune.data.captions import PLACEHOLDER, CaptionBook, KohyaFolder, most_epochs, open_captions, too_large
from gracetune.data.errors import DataError, UnreadableMediaError
from gracetune.data.geometry import Geometry
from gracetune.data.index import DataIndex, check_unreadable, masks_id
from gracetune.data.items import (
    DatasetIndex,
    Dropped,
    Item,
    kohya_folders,
    limit_items,
    sort_into_buckets,
    split_held_out,
)
from gracetune.data.media import EXTENSIONS, Kind, kind_of
from gracetune.data.media.augment import read_transforms
from gracetune.data.media.probe import AudioFacts
from gracetune.data.media_files import MediaFile
from gracetune.data.notes import notes_on
from gracetune.data.pairs import (
    Paired,
    conditioning_datasets,
    with_alpha_masks,
    with_canny_references,
    with_masks,
    with_references,
)
from gracetune.data.refs import Canny
from gracetune.data.sampler import BatchMixing
from gracetune.data.scan import SavedScan, Scan, scan
from gracetune.data.scan_workers import Threads
from gracetune.data.staging.file_selection import reasons
from gracetune.data.text_format import counted, some
from gracetune.errors import ConfigError, Problem
from gracetune.memory.reclaim import rare_collections

OpenBackend = Callable[[Dataset], Backend]
OnDataset = Callable[[str, int, int], None]
"""Called with the dataset's id, the number of files scanned, and the total."""


def scan_folder(config: RunConfig) -> Path:
    """The folder that stores scan results, below the run's caches."""
    caches = config.cache.cache_dir or str(Path(config.output_dir) / "cache")
    return Path(caches).expanduser() / "scan"


def build_index(
    config: RunConfig,
    geometry: Geometry,
    *,
    open_backend: OpenBackend = open_unstaged,
    scans: Path | None = None,
    saves_scans: bool = True,
    workers: int = 8,
    on_scanned: OnDataset = lambda name, done, total: None,
) -> DataIndex:
    """Scan all enabled datasets and build the index. `scans` is the folder for scan results; None stores none.
    With `saves_scans=False`, results of earlier scans are used and none are written.

    By default files are read from their source and nothing is staged. Pass `open_backend` to change that.
    """
    reject_unsupported(config, geometry)
    with rare_collections():
        return _Builder(config, geometry, open_backend, scans, saves_scans, workers, on_scanned).build()


def mixing_of(config: RunConfig) -> BatchMixing:
    """The config's rules for composing batches."""
    training, validation = config.training, config.validation
    intervals = (config.checkpoints.every_steps, validation.every_steps if validation.enabled else None)
    return BatchMixing(
        fill=training.fill_batches,
        equal=training.dataset_weights == "equal",
        other_steps=tuple(steps for steps in intervals if steps is not None),
    )


def reject_unsupported(config: RunConfig, geometry: Geometry) -> None:
    """Raise ConfigError with every data setting that is valid in a config but unsupported here."""
    problems = [*_unsupported(config), *_unfit_multiples(config, geometry)]
    if problems:
        raise ConfigError(problems)


def _unsupported(config: RunConfig) -> Iterator[Problem]:
    enabled = {dataset.id: dataset for dataset in config.datasets if not dataset.disabled}
    for position, dataset in enumerate(config.datasets):
        location = f"datasets[{position}]"
        if dataset.disabled:
            continue
        if dataset.crop.enabled and dataset.crop.style == "face":
            yield Problem(f"{location}.crop.style", "face", "random, center or corner: face detection is not supported",
                          "write center, or crop the images beforehand")  # fmt: skip
        for name in dataset.conditioning:
            if name not in enabled:
                yield Problem(f"{location}.conditioning", f"{name}, which is disabled", "an enabled dataset",
                              f"enable {name}, or remove it here")  # fmt: skip
        if dataset.mask.path is not None and dataset.mask.from_alpha:
            yield Problem(f"{location}.mask", "path and from_alpha", "one of the two", "remove one of them")


def _unfit_multiples(config: RunConfig, geometry: Geometry) -> Iterator[Problem]:
    """Settings for sides and frame counts that the model does not support."""
    least = geometry.least_multiple
    for position, dataset in enumerate(config.datasets):
        multiple = dataset.buckets.multiple
        if multiple is not None and multiple % least and not dataset.disabled:
            near = max(1, round(multiple / least)) * least
            expected = f"a multiple of {least}, because the model supports no other sides"
            yield Problem(f"datasets[{position}].buckets.multiple", str(multiple), expected, f"write {near}")
        step = dataset.video.frame_step
        if step is not None and step % geometry.frame_step and dataset.dataset_type == "video":
            expected = f"a multiple of {geometry.frame_step}, because the model supports no other lengths"
            hint = f"write {-(-step // geometry.frame_step) * geometry.frame_step}"
            yield Problem(f"datasets[{position}].video.frame_step", str(step), expected, hint)


@dataclass
class _Builder:
    """The state of one `build_index` call: backends and scans are shared between datasets of the same folder."""

    config: RunConfig
    geometry: Geometry
    open_backend: OpenBackend
    scan_folder: Path | None
    saves_scans: bool
    workers: int
    on_scanned: OnDataset

    def __post_init__(self) -> None:
        self.enabled = {dataset.id: dataset for dataset in self.config.datasets if not dataset.disabled}
        self.seed = self.config.training.seed
        self.backends: dict[str, Backend] = {}
        self.scans: dict[tuple[str, Kind, tuple[str, ...] | None], Scan] = {}

    def build(self) -> DataIndex:
        trained: list[DatasetIndex] = []
        held_out: list[DatasetIndex] = []
        for position, dataset in enumerate(self.config.datasets):
            if dataset.disabled or dataset.dataset_type == "conditioning":
                continue
            index = self.index(position, dataset)
            if dataset.dataset_type == "eval":
                held_out.append(index)
            elif dataset.held_out:
                kept, apart = _without_held_out(index)
                trained.append(kept)
                held_out.append(apart)
            else:
                trained.append(index)
        notes = [
            f"dataset {name} was not read, because no dataset uses it as conditioning data"
            for name, dataset in self.enabled.items()
            if dataset.dataset_type == "conditioning" and name not in self.backends
        ]
        unsaved = sorted({found.save_error for found in self.scans.values() if found.save_error is not None})
        notes += [f"the next start scans all files again: {reason}" for reason in unsaved]
        return DataIndex(
            self.seed, self.geometry, tuple(trained), tuple(held_out), self.backends, tuple(notes),
            mixing_of(self.config),
        )  # fmt: skip

    def index(self, position: int, dataset: Dataset) -> DatasetIndex:
        location = f"datasets[{position}]"
        transforms = read_transforms(dataset.augmentation.transforms, f"{location}.augmentation.transforms")
        found = self.scan(dataset, self.kind(dataset))
        items, dropped = sort_into_buckets(found.files, dataset, self.geometry, self.seed)
        folders = kohya_folders([file.path for file in found.files]) if dataset.kohya_folders else {}
        items, skipped = _folder_visits(items, dataset, folders)
        paired = self.pair(dataset, items)
        items, beyond = limit_items(paired.items, dataset)
        items, uncaptioned, other_sizes = self.caption(dataset, location, items, folders, found)
        unreadable = (*found.unreadable, *uncaptioned)
        check_unreadable(dataset, unreadable, found.total)
        dropped = [*dropped, *skipped, *paired.dropped, *beyond]
        if not items:
            raise _nothing_left(dataset, location, dropped, unreadable)
        index = DatasetIndex(
            position, dataset, tuple(items), transforms, tuple(dropped), unreadable, found.left_out, found.others
        )
        return replace(index, notes=(*paired.notes, *other_sizes, *notes_on(index, folders, self.geometry)))

    def kind(self, dataset: Dataset) -> Kind:
        if dataset.dataset_type in ("image", "video", "audio"):
            return dataset.dataset_type
        if dataset.dataset_type == "conditioning" or self.geometry.makes == "image":
            return "image"
        # The held-out set of a video model may hold clips or images, like its training data.
        found = {kind_of(path) for path in self.backend(dataset).list()}
        return self.geometry.makes if self.geometry.makes in found else "image"

    def backend(self, dataset: Dataset) -> Backend:
        if dataset.id not in self.backends:
            self.backends[dataset.id] = self.open_backend(dataset)
        return self.backends[dataset.id]

    def scan(self, dataset: Dataset, kind: Kind) -> Scan:
        """Scan a folder once, however many datasets share it."""
        extensions = dataset.in_memory.file_extensions if dataset.is_staged else None
        key = (dataset.path, kind, extensions)
        backend = self.backend(dataset)
        folder = self.scan_folder
        saved = None if folder is None else SavedScan(folder, backend.root, kind, saves=self.saves_scans)
        if key not in self.scans:
            self.scans[key] = scan(
                backend,
                kind,
                saved=saved,
                extensions=extensions,
                workers=self.workers,
                on_scanned=lambda done, total: self.on_scanned(dataset.id, done, total),
            )
        if not self.scans[key].total:
            raise _empty(dataset, kind, self.scans[key])
        return self.scans[key]

    def pair(self, dataset: Dataset, items: list[Item]) -> Paired:
        """Attach references and masks to all items."""
        partners = conditioning_datasets(dataset, self.enabled)
        masks = [partner for partner in partners if partner.conditioning_type == "mask"]
        references = [partner for partner in partners if partner not in masks]
        paired = Paired(items, [], [])
        if references:
            files = [(partner, self.readable(partner)) for partner in references]
            paired = with_references(paired.items, dataset, files, self.geometry, self.seed)
        edges = dataset.canny_reference
        if edges is not None:
            thresholds = Canny(edges.low_threshold, edges.high_threshold)
            paired = _joined(paired, with_canny_references(paired.items, dataset, thresholds))
        for partner in masks:
            paired = _joined(paired, with_masks(paired.items, partner.mask, partner.id, self.readable(partner)))
        if dataset.mask.path is not None:
            folder = _mask_folder(dataset, dataset.mask.path)
            paired = _joined(paired, with_masks(paired.items, dataset.mask, folder.id, self.readable(folder)))
        elif dataset.mask.from_alpha:
            paired = _joined(paired, with_alpha_masks(paired.items, dataset.mask, dataset.id))
        return paired

    def readable(self, partner: Dataset) -> tuple[MediaFile, ...]:
        """The readable images of a folder with references or masks."""
        found = self.scan(partner, "image")
        check_unreadable(partner, found.unreadable, found.total)
        return found.files

    def caption(
        self,
        dataset: Dataset,
        location: str,
        items: list[Item],
        folders: dict[str, KohyaFolder],
        scan: Scan,
    ) -> tuple[list[Item], list[LeftOut], list[str]]:
        """Attach captions to all items. Returns the captioned items, the unreadable captions, and notes.

        An unreadable caption counts as an unreadable file. The notes are about captions with an unused placeholder, and
        about files whose size differs from the one in their caption table.
        """
        withheld = {path: too_large(size) for path, size in scan.oversized.items()}
        withheld |= {file.path: f"a caption that cannot be read: {file.reason}" for file in scan.left_out}
        epochs = most_epochs(self.config.training, dataset, sum(item.visits for item in items))
        book = open_captions(dataset.captions, self.backends[dataset.id], f"{location}.captions", withheld)

        unfilled: list[str] = []

        def find(item: Item) -> Item | LeftOut:
            folder = folders.get(_top(item.path)) if folders else None
            try:
                found = book.find(item.path, None if folder is None else folder.name)
            except UnreadableMediaError as error:
                return LeftOut(error.path, error.reason)
            if not book.options.trigger_word and any(PLACEHOLDER in text for text in found.texts):
                unfilled.append(item.path)
            variants = book.variants(found, self.seed, epochs * item.visits)
            # Not `dataclasses.replace`, which takes several times as long, and there may be a million items.
            return Item(
                item.file, item.bucket, item.visits, variants, found.origin, item.references, item.mask,
                item.normalises_mask,
            )  # fmt: skip

        results = [*Threads(find, self.workers).map(items)]
        captioned = [result for result in results if isinstance(result, Item)]
        return (
            captioned,
            [result for result in results if isinstance(result, LeftOut)],
            [*_unfilled(sorted(unfilled)), *_other_sizes(captioned, book)],
        )


def _unfilled(paths: list[str]) -> Iterator[str]:
    if paths:
        count = counted(len(paths), "sample")
        yield f"{count} with {PLACEHOLDER} in the caption, removed because there is no trigger_word: {some(paths)}"


def _other_sizes(items: list[Item], book: CaptionBook) -> Iterator[str]:
    """A note on files whose size differs from the table's: it was made for other files, or before they were scaled."""
    listed = {item: book.size_of(item.path) for item in items if not isinstance(item.file.facts, AudioFacts)}
    different = {item: size for item, size in listed.items() if size is not None and size != item.size}
    if different:
        first, (width, height) = next(iter(different.items()))
        yield (
            f"{counted(len(different), 'file')} whose size differs from width_column and height_column, for example "
            f"{first.path}: {first.size[0]}x{first.size[1]}, not {width}x{height}; the files' own sizes are used"
        )


def _without_held_out(index: DatasetIndex) -> tuple[DatasetIndex, DatasetIndex]:
    """A dataset without the items it holds out, and those alone. All notes stay with the first."""
    trained, apart = split_held_out([*index.items], index.dataset)
    if not trained:
        found = f"{index.dataset.held_out} of {counted(len(index.items), 'sample')}"
        expected = "fewer than the dataset has: the others are trained on"
        location = f"datasets[{index.position}].held_out"
        raise ConfigError([Problem(location, found, expected, f"write {len(index.items) // 10}")])
    return replace(index, items=tuple(trained)), replace(
        index, items=tuple(apart), dropped=(), unreadable=(), left_out=(), others=None, notes=()
    )


def _mask_folder(dataset: Dataset, path: str) -> Dataset:
    """A dataset's mask folder as a dataset of its own. The filter for image extensions does not apply to masks."""
    staging = dataset.in_memory.model_copy(update={"file_extensions": None})
    return dataset.model_copy(
        update={"id": masks_id(dataset.id), "path": path, "dataset_type": "image", "in_memory": staging}
    )


def _joined(before: Paired, after: Paired) -> Paired:
    return Paired(after.items, [*before.dropped, *after.dropped], [*before.notes, *after.notes])


def _folder_visits(
    items: list[Item], dataset: Dataset, folders: dict[str, KohyaFolder]
) -> tuple[list[Item], list[Dropped]]:
    """Apply the repeat counts in kohya folder names, unless the config sets `repeats`."""
    if not folders or dataset.repeats:
        return items, []
    kept: list[Item] = []
    dropped: list[Dropped] = []
    for item in items:
        folder = folders[_top(item.path)]
        if folder.visits:
            kept.append(replace(item, visits=folder.visits))
        else:
            dropped.append(Dropped(item.path, "in a folder whose number is 0", folder.name))
    return kept, dropped


def _top(path: str) -> str:
    """The first part of a path: the top-level folder, or the file itself."""
    return path.partition("/")[0]


def _empty(dataset: Dataset, kind: Kind, found: Scan) -> DataError:
    others = ", ".join(f"{count} x {name}" for name, count in list(found.others.items())[:5])
    withheld = "; ".join(f"{counted(count, 'file')} left out: {reason}" for reason, count in reasons(found.left_out))
    contents = "; ".join(filter(None, [others and f"it holds {others}", withheld])) or "the folder is empty"
    readable = ", ".join(sorted(EXTENSIONS[kind]))
    return DataError(
        problem_text(
            f"dataset {dataset.id}",
            found=f"no {kind} in {dataset.path}: {contents}",
            expected=f"at least one {kind} file ({readable})",
            hint="check the dataset's path and its dataset_type",
        )
    )


def _nothing_left(
    dataset: Dataset, location: str, dropped: list[Dropped], unreadable: tuple[LeftOut, ...]
) -> DataError:
    counts = Counter(one.reason for one in dropped)
    counts.update("unreadable" for _ in unreadable)
    lines = "".join(f"\n    {count} x {reason}" for reason, count in counts.most_common())
    first = f", for example {dropped[0].path}: {dropped[0].detail}" if dropped else ""
    return DataError(
        problem_text(
            f"dataset {dataset.id} ({location})",
            found=f"no file of {dataset.path} is left to train on{first}",
            expected="at least one",
            hint="change the settings that exclude the files:",
        )
        + lines
    )
