"""Making a planned copy: each part is transferred, checked, unpacked and recorded in the journal.

After any interruption the next start continues: finished parts are in the journal, unfinished ones in `incoming`.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gracetune.data.backends.errors import too_many
from gracetune.data.copies.archives import read_index, unpack_archive
from gracetune.data.copies.errors import CopyError, DamagedPartError
from gracetune.data.copies.folder import CopyFolder, CopyManifest, FinishedPart
from gracetune.data.copies.layout import Part, kind_for, media_column
from gracetune.data.copies.plan import UNPACKED_AT_ONCE, CopyPlan, fetched_file, part_file, wanted_columns
from gracetune.data.copies.rows import FILE_NAME, FILTERED, METADATA, ROWS, PartWriter, cut_tile, passes, stem_of
from gracetune.data.copies.sources import open_file
from gracetune.data.copies.tables import (
    METADATA_TABLES,
    FolderRows,
    check_table_columns,
    folder_rows,
    is_metadata,
    unpack_parquet,
)
from gracetune.data.copies.url_lists import fetch_addresses
from gracetune.data.media import kind_of
from gracetune.data.text_format import counted
from gracetune.storage.atomic import LineFile, publish_folder, sync_folder, temporary_name, write_file
from gracetune.storage.transfer import OnFetched, RetryPolicy, TransferError, transfer

REQUESTS: Final = 8
"""Requests in flight at once."""
FILES_AT_ONCE: Final = 8
_ROW_FILES = ".jsonl"


@dataclass(frozen=True)
class FinishedCopy:
    folder: CopyFolder
    manifest: CopyManifest
    notes: tuple[str, ...] = ()


def make_copy(
    plan: CopyPlan,
    *,
    on_fetched: OnFetched = lambda done, total: None,
    retry_policy: RetryPolicy = RetryPolicy(),  # noqa: B008
) -> FinishedCopy:
    """Make the copy. The caller must hold the folder's lock."""
    return _Making(plan, on_fetched, retry_policy).run()


class _Making:
    def __init__(self, plan: CopyPlan, on_fetched: OnFetched, retry_policy: RetryPolicy) -> None:
        self._plan, self._retry_policy = plan, retry_policy
        self._folder, self._source, self._dataset = plan.folder, plan.source, plan.dataset
        self._kind = kind_for(plan.dataset)
        self._index = plan.index
        self._stopped = threading.Event()
        done = plan.layout.size - plan.to_fetch - plan.received  # `transfer` reports what was received earlier
        self._counter = _Counter(plan.layout.size, done, on_fetched, self._stopped)

    def run(self) -> FinishedCopy:
        plan, folder = self._plan, self._folder
        before = folder.manifest()
        if before is None or before.revision != self._source.revision:
            folder.start_over()
        incomplete = CopyManifest(
            source=self._source.address, revision=self._source.revision, format=plan.layout.format,
            split=plan.options.split,
        )  # fmt: skip
        folder.write_manifest(incomplete)
        journal = folder.journal()
        try:
            with self._explained():
                rows = self._fetch_parts(journal)
                return self._finish(incomplete, rows)
        finally:
            journal.close()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _fetch_parts(self, journal: LineFile) -> FolderRows | None:
        """Fetch all missing parts. For a folder of files, returns the rows of its tables."""
        plan = self._plan
        if plan.layout.format == "urls":
            fetch_addresses(plan, journal, self._folder, self._kind)
            return None
        beside = {part.path for part in plan.layout.beside}
        first = [part for part in plan.missing if part.path in beside]
        with ThreadPoolExecutor(REQUESTS, thread_name_prefix="requests") as requests:
            self._each(first, lambda part: self._take_file(part, requests), journal, FILES_AT_ONCE)
            rows = self._folder_rows() if plan.layout.format == "files" else None
            others = [part for part in plan.missing if part.path not in beside and self._is_wanted(part, rows)]
            if plan.layout.format == "files":
                self._each(others, lambda part: self._take_file(part, requests), journal, FILES_AT_ONCE)
            else:
                self._each(others, lambda part: self._unpack(part, requests), journal, UNPACKED_AT_ONCE)
        return rows

    def _each(
        self, parts: Sequence[Part], take: Callable[[Part], FinishedPart], journal: LineFile, at_once: int
    ) -> None:
        """Take the parts, several at a time. The first failure stops all of them."""

        def work(part: Part) -> None:
            if not self._stopped.is_set():
                done = take(part)
                journal.write(done.model_dump_json().encode() + b"\n")

        with ThreadPoolExecutor(at_once, thread_name_prefix="parts") as pool:
            futures: list[Future[None]] = [pool.submit(work, part) for part in parts]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()  # raises the first failure: the transfers it stopped are not done yet
            finally:
                self._stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)
        self._stopped.clear()

    def _take_file(self, part: Part, requests: Executor) -> FinishedPart:
        """Fetch a file that is kept unchanged. The source's own `metadata.jsonl` goes to the root of the copy, because
        the copy writes one itself."""
        name = f"source-{METADATA}" if part.path == METADATA else part.path
        target = (self._folder.root if part.path == METADATA else self._folder.data) / name
        local_file = self._bring(part, requests)
        target.parent.mkdir(parents=True, exist_ok=True)
        if self._plan.options.tile is not None and kind_of(part.path) == "image":
            return self._take_tile(part, local_file, target)
        if local_file == self._source.cached(part.path):
            _link_or_copy(local_file, target, self._folder.incoming)
        else:
            local_file.replace(target)
        sync_folder(target.parent)
        is_medium = kind_of(part.path) == self._kind
        return _finished(part, part.path, files=int(part.path != METADATA), size=target.stat().st_size,
                         samples=int(is_medium))  # fmt: skip

    def _take_tile(self, part: Part, local_file: Path, target: Path) -> FinishedPart:
        tile = self._plan.options.tile
        if tile is None:
            raise ValueError("local_copy.tile is not set")
        target = target.with_name(f"{stem_of(target.name)}.png")
        try:
            write_file(target, cut_tile(local_file.read_bytes(), tile))
        except (OSError, ValueError) as error:
            raise DamagedPartError(part.path, f"an image that cannot be cropped: {error}") from error
        _remove_unless_cached(local_file, self._source.cached(part.path))
        at = f"{stem_of(part.path)}.png"
        return _finished(part, at, files=1, size=target.stat().st_size, samples=1)

    def _unpack(self, part: Part, requests: Executor) -> FinishedPart:
        """Fetch and unpack a table or an archive. Its folder appears once all files are written."""
        local_file = self._bring(part, requests)
        target = self._folder.data / part.folder
        temporary = self._folder.incoming / temporary_name()
        temporary.mkdir(parents=True)
        writer = PartWriter(temporary, part.folder, kind=self._kind, tile=self._plan.options.tile)
        try:
            self._read_into(writer, part, local_file)
            self._read_tables(writer, temporary)
            writer.close()
            if target.exists():
                shutil.rmtree(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            publish_folder(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _remove_unless_cached(local_file, self._source.cached(part.path))
        return _finished(part, part.folder, files=writer.files, size=writer.size, samples=writer.samples,
                         left_out=writer.left_out, columns=tuple(writer.columns))  # fmt: skip

    def _read_into(self, writer: PartWriter, part: Part, local_file: Path) -> None:
        options = self._plan.options
        if self._plan.layout.format == "parquet":
            unpack_parquet(local_file, part.path, writer, media=media_column(self._dataset, options),
                           filters=options.filter, rows=part.rows)  # fmt: skip
            return
        known = read_index(self._index_of(part))
        unpack_archive(
            local_file, part.path, writer, kind=self._kind, media=options.media_column, filters=options.filter,
            index=known,
        )  # fmt: skip

    def _index_of(self, part: Part) -> bytes:
        """The index file of an archive, from `local_copy.index` or from next to the archive; empty if there is none."""
        name = f"{stem_of(part.path)}.json"
        if self._index is None:
            beside = self._folder.data / name
            return beside.read_bytes() if beside.is_file() else b""
        files = self._index.files()
        found = next((path for path in (name, name.rpartition("/")[2]) if path in files), None)
        if found is None:
            return b""
        with self._index.explained(), open_file(self._index, found) as file:
            return file.read()

    def _read_tables(self, writer: PartWriter, folder: Path) -> None:
        """Merge the rows of tables inside an archive, such as the `metadata.csv` of a folder of images."""
        found = [path for name in METADATA_TABLES for path in folder.rglob(name)]
        tables = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
        if tables and self._plan.layout.format == "archives":
            writer.merge(folder_rows(self._dataset, tables, None).rows)

    def _bring(self, part: Part, requests: Executor) -> Path:
        """Transfer a part if needed. Returns its path on this disk, complete and checked."""
        local_file = self._source.cached(part.path)
        if local_file is not None:
            return local_file
        incoming = part_file(self._folder, part)
        complete = fetched_file(self._folder, part)
        if not complete.exists():
            try:
                transfer(complete, incoming, part.remote, self._source.ranges(part.path), requests,
                         on_bytes=self._counter.add, retry_policy=self._retry_policy)  # fmt: skip
            except TransferError as error:
                hint = "start again to download it again; if that fails too, the file at the source is damaged"
                found = f"{part.path} of {self._source.address}: {error.found}"
                raise CopyError.of(self._dataset.id, found=found, expected=error.expected, hint=hint) from error
        return complete

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _folder_rows(self) -> FolderRows:
        """The rows of the tables in a folder of files. Raises CopyError if a configured column is missing."""
        tables = {part.path: self._table(part.path) for part in self._plan.layout.beside if is_metadata(part.path)}
        found = folder_rows(self._dataset, tables, self._plan.options.media_column)
        wanted = wanted_columns(self._dataset, self._plan.options)
        if wanted:
            check_table_columns(self._dataset.id, found.columns, wanted)
        return found

    def _table(self, path: str) -> bytes:
        root = self._folder.root / f"source-{METADATA}"
        return (root if path == METADATA else self._folder.data / path).read_bytes()

    def _is_wanted(self, part: Part, rows: FolderRows | None) -> bool:
        """Whether a file's row passes the filters, and names the file if the media column is one of several."""
        if rows is None or kind_of(part.path) is None:
            return True
        row = rows.rows.get(part.path)
        if rows.chosen and row is None:
            return False
        return passes(row or {}, self._plan.options.filter)

    # -- completion ---------------------------------------------------------------------------------------------------

    def _finish(self, incomplete: CopyManifest, rows: FolderRows | None) -> FinishedCopy:
        """Remove outdated parts, write the metadata and mark the copy complete."""
        finished = self._folder.finished()
        self._remove_others(finished)
        parts = [finished[part.path] for part in (*self._plan.layout.beside, *self._plan.layout.parts)
                 if part.path in finished]  # fmt: skip
        if incomplete.format == "urls":
            parts = [*finished.values()]
        left_out: dict[str, int] = {}
        for part in parts:
            for reason, count in part.left_out.items():
                left_out[reason] = left_out.get(reason, 0) + count
        samples = sum(part.samples for part in parts)
        self._check_left_out(left_out, samples)
        self._write_metadata(parts, rows)
        files, size = self._folder.measure()
        manifest = incomplete.model_copy(update={
            "complete": True, "parts": len(parts), "samples": samples, "files": files, "bytes": size,
            "left_out": left_out,
        })  # fmt: skip
        self._folder.write_manifest(manifest)
        shutil.rmtree(self._folder.incoming, ignore_errors=True)
        notes = [
            f"dataset {self._dataset.id}: {counted(count, 'sample')} left out of the copy: {reason}"
            for reason, count in left_out.items()
        ]
        return FinishedCopy(self._folder, manifest, tuple(notes))

    def _remove_others(self, finished: Mapping[str, FinishedPart]) -> None:
        """Remove finished parts that the source no longer has."""
        wanted = {part.path for part in (*self._plan.layout.beside, *self._plan.layout.parts)}
        for name, part in finished.items():
            path = self._folder.data / part.at
            if name not in wanted and self._plan.layout.format != "urls" and path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _check_left_out(self, left_out: Mapping[str, int], samples: int) -> None:
        """Raise CopyError if no sample is left, or if more are damaged than `corrupt_threshold` allows."""
        damaged = sum(count for reason, count in left_out.items() if reason != FILTERED)
        total = samples + damaged
        if samples and not too_many(damaged, total, self._dataset.corrupt_threshold):
            return
        reasons = "; ".join(f"{count} x {reason}" for reason, count in left_out.items()) or "it has no samples"
        if not samples:
            hint = "check local_copy.media_column, local_copy.filter and the dataset's dataset_type"
            found = f"no {self._kind} in {self._source.address}: {reasons}"
            raise CopyError.of(self._dataset.id, found=found, expected="at least one", hint=hint)
        expected = f"at most {self._dataset.corrupt_threshold:.3g} of them (corrupt_threshold)"
        hint = "raise corrupt_threshold to train without them"
        raise CopyError.of(self._dataset.id, found=f"{damaged} of {total} samples cannot be used: {reasons}",
                           expected=expected, hint=hint)  # fmt: skip

    def _write_metadata(self, parts: Sequence[FinishedPart], rows: FolderRows | None) -> None:
        """Write `metadata.jsonl`, in which every row has every column."""
        self._folder.data.mkdir(parents=True, exist_ok=True)
        if rows is not None:
            names = {part.part: part.at for part in parts}  # a cropped image has a different extension
            lines: Iterator[Mapping[str, Any]] = (
                {**row, FILE_NAME: names[path]} for path, row in rows.rows.items() if path in names
            )
            columns: Iterable[str] = (name for row in rows.rows.values() for name in row)
        else:
            lines = (row for part in parts for row in self._rows_of(part))
            columns = (name for part in parts for name in part.columns)
        empty = dict.fromkeys(columns)
        if empty or rows is None:
            chunks = (json.dumps({**empty, **row}, ensure_ascii=False).encode() + b"\n" for row in lines)
            write_file(self._folder.data / METADATA, chunks)

    def _rows_of(self, part: FinishedPart) -> Iterator[Mapping[str, Any]]:
        path = self._folder.data / part.at
        file = path / ROWS if path.is_dir() else path.with_name(f".{path.name}{_ROW_FILES}")
        if file.is_file():
            with file.open(encoding="utf-8") as stream:
                yield from (json.loads(line) for line in stream)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the source and of damaged parts into CopyError."""
        try:
            with self._source.explained():
                yield
        except DamagedPartError as error:
            remedy = f"to fetch it again, remove {self._folder.root}"
            raise error.of(self._dataset.id, self._source.address, remedy) from error


class _StoppedError(Exception):
    """Another part failed or the user interrupted. This transfer stops too, and resumes at the next start."""


class _Counter:
    """Counts the transferred bytes of all threads, and stops their transfers on failure."""

    def __init__(self, total: int, done: int, on_fetched: OnFetched, stopped: threading.Event) -> None:
        self._total, self._done, self._on_fetched, self._stopped = total, done, on_fetched, stopped
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        if self._stopped.is_set():
            raise _StoppedError
        with self._lock:
            self._done += count
            self._on_fetched(min(self._done, self._total), self._total)


def _finished(
    part: Part, at: str, *, files: int, size: int, samples: int, left_out: Mapping[str, int] | None = None,
    columns: tuple[str, ...] = (),
) -> FinishedPart:  # fmt: skip
    remote, rows = part.remote, part.rows
    return FinishedPart(
        part=part.path, size=remote.size, digest=remote.digest, tag=remote.tag,
        rows=None if rows is None else (rows.start, rows.stop),
        at=at, files=files, bytes=size, samples=samples, left_out=dict(left_out or {}), columns=columns,
    )  # fmt: skip


def _link_or_copy(local_file: Path, target: Path, incoming: Path) -> None:
    """Hard-link a file to `target`, or copy it if it is on another disk."""
    temporary = incoming / temporary_name()
    incoming.mkdir(parents=True, exist_ok=True)
    try:
        temporary.hardlink_to(local_file.resolve())
    except OSError:
        shutil.copyfile(local_file, temporary)
    temporary.replace(target)


def _remove_unless_cached(local_file: Path, cached: Path | None) -> None:
    """Remove a file after unpacking, unless it is the source's own (`CopySource.cached`)."""
    if local_file != cached:
        local_file.unlink(missing_ok=True)
