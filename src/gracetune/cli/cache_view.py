"""The output of `gracetune cache`: progress, results as text, and results as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from gracetune.cache.ai_toolkit_files import ImportReport
from gracetune.cache.audit import Audit, EntryGroup
from gracetune.cache.encode_passes import PassOutcome
from gracetune.cache.pass_worker import PassProgress
from gracetune.cache.required_entries import RequiredEntry
from gracetune.cache.session import Caches, FilledCaches, Needs
from gracetune.cache.store import DamagedShard
from gracetune.cli.console import mark, shown
from gracetune.data.text_format import counted
from gracetune.units import MIB, format_bytes, format_duration

_EXAMPLES = 3
"""The number of missing or corrupt entries that are printed."""
_REASONS = 8
"""The number of reasons for rejected files that are printed."""


# -- progress ---------------------------------------------------------------------------------------------------------


class ProgressLines:
    """Prints a line of progress, at most every half minute."""

    EVERY_S = 30.0

    def __init__(self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._print, self._clock = report, clock
        self._last = clock()

    def show(self, what: str, done: int, total: int, pace: str) -> None:
        if self._clock() - self._last >= self.EVERY_S:
            self._last = self._clock()
            self._print(f"{what}: {done} of {total}" + (f", {pace}" if pace else ""))


class ProgressBars:
    """Progress bars on stderr. If stderr is a file or a pipe, `lines` prints an occasional line for the log instead."""

    def __init__(self, progress: Progress, lines: ProgressLines | None = None) -> None:
        self._progress, self._lines = progress, lines
        self._tasks: dict[str, Any] = {}

    def on_scanned(self, name: str, done: int, total: int) -> None:
        self._show(f"looking at {name}", done, total, "")

    def on_text(self, progress: PassProgress) -> None:
        self._encode("captions", progress)

    def on_latents(self, progress: PassProgress) -> None:
        self._encode("latents", progress)

    def on_checked(self, done: int, total: int) -> None:
        """`done` and `total` are in bytes."""
        self._show("checking existing entries, MiB", done // MIB, max(1, total // MIB), "")

    def _encode(self, what: str, progress: PassProgress) -> None:
        rate = "" if progress.per_second is None else f"{progress.per_second:.3g}/s"
        left = "" if progress.seconds_left is None else f", {format_duration(progress.seconds_left)} left"
        self._show(f"encoding {what}", progress.done, progress.total, rate + left)

    def _show(self, what: str, done: int, total: int, pace: str) -> None:
        if self._lines is not None:
            self._lines.show(what, done, total, pace)
            return
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total, pace=pace)
        self._progress.update(self._tasks[what], completed=done, total=total, pace=pace)


@contextmanager
def bars(*, quiet: bool) -> Iterator[ProgressBars]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}", markup=False),
    )
    on_terminal = console.is_terminal
    lines = None if on_terminal else ProgressLines(lambda line: print(line, file=sys.stderr, flush=True))
    with Progress(*columns, console=console, transient=True, disable=quiet or not on_terminal) as progress:
        yield ProgressBars(progress, lines)


# -- build ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreView:
    """One cache folder: the latents or the text embeddings."""

    folder: str
    entries: int
    size: int
    """Total bytes of its files."""


@dataclass(frozen=True)
class BuiltView:
    built: FilledCaches
    stores: tuple[StoreView, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, built: FilledCaches, caches: Caches, notes: tuple[str, ...]) -> BuiltView:
        stores = [
            StoreView(str(store.folder), len(store.keys()), sum(store.catalogue.sizes.values()))
            for store in caches.stores
        ]
        return cls(built, tuple(stores), notes)

    def as_json(self) -> dict[str, Any]:
        return {
            "encoded": self.built.encoded,
            "text": _outcome_json(self.built.texts),
            "latents": _outcome_json(self.built.latents),
            "imported": {
                "text": _import_json(self.built.imported_texts),
                "latents": _import_json(self.built.imported_latents),
            },
            "stores": [{"folder": one.folder, "entries": one.entries, "bytes": one.size} for one in self.stores],
            "unreadable": [asdict(one) for one in (*self.built.texts.damaged, *self.built.latents.damaged)],
            "notes": [*self.notes],
        }

    def print(self, console: Console) -> None:
        for name, outcome, imported in (
            ("captions", self.built.texts, self.built.imported_texts),
            ("latents", self.built.latents, self.built.imported_latents),
        ):
            console.print(f"[bold]{name:9}[/] {_outcome_line(outcome, 0 if imported is None else imported.imported)}")
            _print_import(console, imported)
        if not self.built.encoded:
            console.print("nothing was encoded: the caches are complete")
        for one in self.stores:
            console.print(f"[bold]cache[/]     {shown(one.folder)}: {_entries(one.entries)}, {format_bytes(one.size)}")
        _print_notes(console, self.notes)


def _outcome_json(outcome: PassOutcome) -> dict[str, Any]:
    return {
        "wanted": outcome.wanted,
        "encoded": outcome.encoded,
        "bytes": outcome.encoded_bytes,
        "by_others": outcome.by_others,
        "seconds": round(outcome.seconds, 3),
        "encoder": {"weights": outcome.encoder.weights, "settings": dict(outcome.encoder.settings)},
    }


def _import_json(report: ImportReport | None) -> dict[str, Any] | None:
    if report is None:
        return None
    rejected = [{"file": str(one.file), "reason": one.reason} for one in report.rejected]
    return {"entries": report.imported, "compared": report.compared, "without_file": report.without_file,
            "refused": rejected}  # fmt: skip


def _print_import(console: Console, report: ImportReport | None) -> None:
    """Print the rejected files by reason, each reason with its first file."""
    if report is None:
        return
    reasons: dict[str, list[str]] = {}
    for one in report.rejected:
        reasons.setdefault(one.reason, []).append(str(one.file))
    console.print(
        f"          from ai-toolkit: {_entries(report.imported)} imported, {report.compared} of them encoded again "
        f"to compare, {counted(len(report.rejected), 'file')} rejected, {report.without_file} wanted without a file"
    )
    for reason, files in [*reasons.items()][:_REASONS]:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        console.print(f"          rejected: {shown(files[0])}{more}: {shown(reason)}")
    if len(reasons) > _REASONS:
        console.print(f"          rejected for {len(reasons) - _REASONS} more reasons: --json lists all")


def _outcome_line(outcome: PassOutcome, imported: int = 0) -> str:
    parts = [f"{outcome.wanted} wanted"]
    if imported:
        parts.append(f"{imported} imported")
    if outcome.encoded:
        seconds = format_duration(outcome.seconds)
        parts.append(f"{outcome.encoded} encoded ({format_bytes(outcome.encoded_bytes)}) in {seconds}")
    if outcome.by_others:
        parts.append(f"{outcome.by_others} encoded by other processes meanwhile")
    unchanged = outcome.found_before - imported
    if unchanged > 0:
        parts.append(f"{unchanged} already there")
    return ", ".join(parts)


# -- audit ------------------------------------------------------------------------------------------------------------


def empty_audit(wanted: list[RequiredEntry]) -> Audit:
    """The audit of a cache that does not exist yet."""
    keys = {one.origin.key: one.what for one in wanted}
    none = EntryGroup(0, 0, ())
    missing = EntryGroup(len(keys), None if keys else 0, tuple(keys))
    return Audit(
        wanted=len(keys),
        present=none,
        missing=missing,
        missing_examples=tuple([*keys.values()][:20]),
        corrupt=none,
        corrupt_examples=(),
        damaged_shards=(),
        stale=none,
        stale_parts={},
        stale_examples=(),
        orphaned=none,
        extra_copies=none,
        imported=0,
        checked=True,
    )


@dataclass(frozen=True)
class AuditView:
    audits: dict[Path, Audit]
    needed_corrupt: dict[Path, int]
    """Number of corrupt entries that this run needs. Other corrupt entries do no harm."""
    notes: tuple[str, ...]

    @classmethod
    def of(cls, audits: dict[Path, Audit], wanted: Needs, notes: tuple[str, ...]) -> AuditView:
        keys = {(item.folder, item.key) for item in wanted.all}
        corrupt = {folder: sum((folder, key) in keys for key in one.corrupt.keys) for folder, one in audits.items()}
        return cls(audits, corrupt, notes)

    @property
    def ok(self) -> bool:
        return not any(self.needed_corrupt.values()) and not any(one.missing.entries for one in self.audits.values())

    def as_json(self) -> dict[str, Any]:
        stores = [
            {"folder": str(folder), **one.as_json(), "needed_corrupt": self.needed_corrupt[folder]}
            for folder, one in self.audits.items()
        ]
        return {"ok": self.ok, "stores": stores, "notes": [*self.notes]}

    def print(self, console: Console) -> None:
        for folder, one in self.audits.items():
            fine = not one.missing.entries and not self.needed_corrupt[folder]
            console.print(f"{mark(console, ok=fine)} [bold]{shown(str(folder))}[/]: {one.wanted} wanted")
            for name in ("present", "missing", "corrupt", "stale", "orphaned", "extra_copies"):
                _print_group(console, name.replace("_", " "), getattr(one, name))
            _print_details(console, one)
        _print_notes(console, self.notes)
        if not self.ok:
            console.print("gracetune cache build CONFIG encodes what is missing or corrupt")


def _print_group(console: Console, name: str, group: EntryGroup) -> None:
    size = "" if group.size is None else f"  {format_bytes(group.size)}"
    if group.entries or name in ("present", "missing", "stale", "corrupt", "orphaned"):
        console.print(f"    {name:13} {group.entries:8}{size}")


def _print_details(console: Console, one: Audit) -> None:
    for what in one.missing_examples[:_EXAMPLES]:
        console.print(f"    missing: {shown(what)}")
    for what in one.corrupt_examples[:_EXAMPLES]:
        console.print(f"    corrupt: {shown(what)}")
    for part, count in one.stale_parts.items():
        example = next((difference for stale in one.stale_examples for difference in stale.differences
                        if difference.part == part), None)  # fmt: skip
        values = ""
        if example is not None:
            values = f", for example {_short(example.stored)} where {_short(example.wanted)} is wanted"
        console.print(f"    stale: {_entries(count)} with another {shown(part)}{shown(values)}")
    for shard in one.damaged_shards:
        console.print(f"    damaged file: {shown(shard.name)}, {format_bytes(shard.size)}: {shown(shard.reason)}")
    if one.damaged_shards:
        console.print("    damaged files only take up space; gracetune cache clear CONFIG --damaged removes them")
    if one.imported:
        console.print(f"    {one.imported} of the present ones were imported")


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    return value if len(value) <= 40 else f"{value[:37]}..."


# -- clear ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cleared:
    folder: Path
    entries: int
    """Entries that were removed."""
    size: int
    """Their bytes."""
    left: int
    """Entries that remain: those that this configuration does not need, or all of them with `only_damaged`."""
    damaged: tuple[DamagedShard, ...] = ()
    """Damaged files that were removed."""
    damaged_left: tuple[DamagedShard, ...] = ()
    """Files that were kept because they may be intact: written by another release, or unreadable this time."""


@dataclass(frozen=True)
class ClearedView:
    stores: tuple[Cleared, ...]
    notes: tuple[str, ...]
    only_damaged: bool = False

    def as_json(self) -> dict[str, Any]:
        stores = [
            {
                "folder": str(one.folder),
                "removed": one.entries,
                "bytes": one.size,
                "left": one.left,
                "damaged_files": [asdict(shard) for shard in one.damaged],
                "damaged_files_left": [asdict(shard) for shard in one.damaged_left],
            }
            for one in self.stores
        ]
        return {"removed": sum(one.entries for one in self.stores), "stores": stores, "notes": [*self.notes]}

    def print(self, console: Console) -> None:
        for one in self.stores:
            console.print(f"[bold]cache[/] {shown(str(one.folder))}: {self._line(one)}")
            for shard in one.damaged:
                console.print(f"    damaged file removed: {shown(shard.name)}, {format_bytes(shard.size)}")
            for shard in one.damaged_left:
                console.print(f"    kept, it may be intact: {shown(shard.name)}: {shown(shard.reason)}")
        if not self.stores:
            console.print("there are no caches of this configuration")
        _print_notes(console, self.notes)

    def _line(self, one: Cleared) -> str:
        if self.only_damaged:
            return f"{counted(len(one.damaged), 'damaged file')} removed; {_entries(one.left)} left"
        left = f"; {_entries(one.left)} of other configurations or settings left" if one.left else ""
        return f"{_entries(one.entries)} removed, {format_bytes(one.size)}{left}"


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _print_notes(console: Console, notes: tuple[str, ...]) -> None:
    for note in dict.fromkeys(notes):
        console.print(f"note: {shown(note)}")
