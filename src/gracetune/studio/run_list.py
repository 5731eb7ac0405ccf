"""The runs below a folder: found by their files, with state and row of each. Nothing is stored."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gracetune.checkpoint.folder import LOCK_FILE
from gracetune.studio.replies import StudioError
from gracetune.studio.run_locks import RunLocks
from gracetune.studio.run_log import RunLog
from gracetune.studio.run_rows import RunSummary, config_time, row_of, state_of

MOST_FOLDERS = 20_000
MOST_DEPTH = 6
_SKIPPED = frozenset({"cache", "checkpoints", "logs", "node_modules", "report", "samples"})
_SEARCH_S = 2.0
"""Time between two searches for run folders; longer where a search takes long."""
_MIDDLE_S = 0.05
"""Time that one refresh spends on the middle of long logs."""


@dataclass(frozen=True)
class RunEntry:
    """A run that was found."""

    id: str
    path: Path
    shown: str
    """The path relative to the studio's folder."""
    summary: RunSummary = field(repr=False, compare=False)
    log: RunLog = field(repr=False, compare=False)


class RunList:
    """All runs below a folder. Thread-safe; the methods may block for the time of a few file operations."""

    def __init__(self, root: Path, locks: RunLocks | None = None) -> None:
        self.root = root
        self._locks = RunLocks() if locks is None else locks
        self._mutex = threading.Lock()
        self._runs: dict[str, RunEntry] = {}
        self._rows: dict[str, tuple[tuple[int, bool, float], dict[str, Any]]] = {}
        self._next_search = 0.0

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all runs, those that changed last first."""
        with self._mutex:
            self._search()
            for run in self._runs.values():
                run.summary.refresh()
            self._search_middles()
            rows = [self._row(run) for run in self._runs.values()]
        return sorted(rows, key=lambda row: (-(row["updated_s"] or row["began_s"] or 0.0), row["path"]))

    def row(self, run: RunEntry) -> dict[str, Any]:
        with self._mutex:
            run.summary.refresh()
            return self._row(run)

    def find(self, identifier: str) -> RunEntry:
        """The run of an id. Raises StudioError if there is none; ids name only runs that were found."""
        with self._mutex:
            if identifier not in self._runs:
                self._search()
            run = self._runs.get(identifier)
        if run is None:
            raise StudioError(404, "no such run", "the id of a run in the list", "reload the list: GET api/runs")
        return run

    def state(self, run: RunEntry) -> str:
        with self._mutex:
            run.summary.refresh()
            return state_of(run.summary, is_locked=self._locks.is_held(run.path))[0]

    def process_of(self, run: RunEntry) -> int | None:
        """The id of the run's process on this machine; None if there is none."""
        with self._mutex:
            return self._locks.holder(run.path)

    def id_of(self, path: Path) -> str | None:
        """The id of the run in this folder; None if it is not below the studio's folder."""
        absolute = Path(path).expanduser().absolute()
        return identifier_of(self._shown(absolute)) if absolute.is_relative_to(self.root) else None

    def _row(self, run: RunEntry) -> dict[str, Any]:
        """The row, made again only if something that it shows may have changed."""
        is_locked = self._locks.is_held(run.path)
        key = (run.summary.version, is_locked, config_time(run.path) if is_locked else 0.0)
        known = self._rows.get(run.id)
        if known is None or known[0] != key:
            known = self._rows[run.id] = (key, row_of(run.summary, run.id, run.shown, is_locked=is_locked))
        return known[1]

    def _search_middles(self) -> None:
        until = time.monotonic() + _MIDDLE_S
        for run in self._runs.values():
            while run.summary.search_middle():
                if time.monotonic() > until:
                    return

    def _search(self) -> None:
        """Find run folders. Known ones keep what was read of their logs."""
        began = time.monotonic()
        if began < self._next_search:
            return
        found: dict[str, RunEntry] = {}
        for path in run_folders(self.root):
            shown = self._shown(path)
            identifier = identifier_of(shown)
            found[identifier] = self._runs.get(identifier) or RunEntry(
                identifier, path, shown, RunSummary(path), RunLog(path)
            )
        self._runs = found
        self._rows = {name: row for name, row in self._rows.items() if name in found}
        ended = time.monotonic()
        self._next_search = ended + max(_SEARCH_S, 20 * (ended - began))

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self.root))


def identifier_of(shown: str) -> str:
    """12 hex digits of a hash of the path relative to the studio's folder."""
    return hashlib.sha256(shown.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def run_folders(root: Path) -> list[Path]:
    """The run folders below a folder, itself included. Symbolic links and hidden folders are not followed, and a run
    is not searched for further runs."""
    found: list[Path] = []
    waiting, seen = [(str(root), 0)], 0
    while waiting and seen < MOST_FOLDERS:
        folder, depth = waiting.pop(0) if len(waiting) < 64 else waiting.pop()
        seen += 1
        if is_run(folder):
            found.append(Path(folder))
            continue
        if depth < MOST_DEPTH:
            waiting += [(path, depth + 1) for path in _subfolders(folder)]
    return found


def is_run(folder: str | Path) -> bool:
    """Whether a folder holds a run: its event log, or the lock of a run that has not begun to train."""
    return os.path.lexists(f"{folder}/logs/events.jsonl") or os.path.lexists(f"{folder}/checkpoints/{LOCK_FILE}")


def _subfolders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [
                entry.path
                for entry in entries
                if not entry.name.startswith(".") and entry.name not in _SKIPPED and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:  # a folder of another user, or one that was removed meanwhile
        return []
