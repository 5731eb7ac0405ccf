"""The folder of a run's checkpoints: written in the background, complete or absent, kept and deleted by rule."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from gracetune.checkpoint.errors import CheckpointError, DamagedCheckpointError, full, unwritable
from gracetune.checkpoint.folder import (
    LOCK_FILE,
    check_lock,
    checkpoints,
    manifest_if_ours,
    remove_superfluous,
    set_aside,
    take_lock,
    temporary_folder,
)
from gracetune.checkpoint.journal import Journal, Work, read_journal
from gracetune.checkpoint.manifest import (
    MANIFEST,
    BadManifestError,
    Manifest,
    Metadata,
    file_stem,
    folder_name,
    identity_differences,
    read_manifest,
    step_of,
)
from gracetune.checkpoint.pieces import (
    Piece,
    Saved,
    Snapshot,
    check_names,
    saved_size,
    snapshot,
)
from gracetune.checkpoint.ranks import OneProcess, Ranks
from gracetune.checkpoint.reading import Checkpoint, Damage, other_run, verify
from gracetune.errors import Problem
from gracetune.storage.atomic import left_bytes, new_folder, sweep_folders
from gracetune.storage.checksums import Fact, write_checksummed
from gracetune.storage.safetensors_files import file_pieces
from gracetune.units import MIB

_MARGIN = MIB
"""Manifest, folder entries, and what others write meanwhile."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that is complete and on the disk."""

    step: int
    path: Path
    size: int
    snapshot_ms: float
    """How long the run was held up for copying."""
    write_ms: float
    """How long writing took in the background."""
    removed: tuple[str, ...]
    """Older checkpoints deleted afterwards."""
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Job:
    step: int
    metadata: Metadata
    shared: Mapping[str, Snapshot]
    per_rank: Mapping[str, Sequence[bytes]]
    needed: int
    snapshot_ms: float

    def files(self) -> Iterator[tuple[str, Iterator[memoryview]]]:
        for name, piece in self.shared.items():
            yield f"{name}.json", iter([memoryview(piece.json)])
            if piece.tensors:
                yield f"{name}.safetensors", file_pieces(piece.tensors)
        for name, ranks in self.per_rank.items():
            for rank, packed in enumerate(ranks):
                stem, (json, tensors) = file_stem(name, rank), _unpacked(packed)
                yield f"{stem}.json", iter([json])
                if tensors:
                    yield f"{stem}.safetensors", iter([tensors])


class CheckpointStore:
    """All ranks make one and call `write` alike; rank 0 alone writes, by one background thread.

    What goes wrong in the background is raised by the next `write`, `wait`, `finished` or `close`.
    """

    def __init__(
        self, folder: Path, keep_last: int, keep_every: int | None = None, *, ranks: Ranks | None = None
    ) -> None:
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"keep the last {keep_last} checkpoints, and every {keep_every} steps one")
        self.folder = folder.expanduser().absolute()
        self._keep_last, self._keep_every = keep_last, keep_every
        self._ranks = OneProcess() if ranks is None else ranks
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._future: concurrent.futures.Future[Written] | None = None
        self._finished: list[Written] = []
        self._lock: int | None = None
        self._journal: Journal | None = None
        self._identity: dict[str, str] | None = None
        self._there: set[int] = set()
        """Steps whose checkpoint holds exactly what `write` would write again."""

    # -- reading ------------------------------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """The newest, whole or damaged; what was never completed does not count."""
        found = checkpoints(self.folder)
        return found[-1].path if found else None

    def open(self, path: Path) -> Checkpoint:
        """Every byte is checked. A damaged one is an error that names the newest whole one before it."""
        found = verify(path)
        if isinstance(found, Checkpoint):
            return found
        good = _newest_whole(path)
        hint = "no earlier one is whole: start anew with --resume none"
        if good is not None:
            hint = f"--resume {good}; this one stays, renamed"
        raise DamagedCheckpointError(
            Problem(
                f"damaged checkpoint, file {found.file}",
                found.found,
                "the bytes that were written; look at the disk (`dmesg`, `smartctl -a`)",
                hint,
                str(path),
            )
        )

    # -- writing ------------------------------------------------------------------------------------------------------

    def claim(self, identity: Mapping[str, str]) -> None:
        """Take the folder for this run: made, locked, freed of what a killed process left half done.

        OtherRunError where it holds checkpoints of another run, BusyFolderError where another process writes here.
        """
        if self._ranks.rank != 0:
            return
        if self._identity is not None:
            different = identity_differences(self._identity, identity)
            if different:
                raise ValueError(f"one store, two runs: {'; '.join(different)}")
            return
        self.refuse_others(identity)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock, locked = take_lock(self.folder)
            self._journal = Journal(self._lock, is_fresh=not locked)
            if locked:
                sweep_folders(self.folder)
        except OSError as error:
            raise unwritable(error, self.folder, needed=0, free=None, last=self.latest()) from error
        self._identity = dict(identity)

    def check_claim(self) -> None:
        """What `claim` would refuse beside the checkpoints of another run. Touches nothing."""
        if self._ranks.rank != 0:
            return
        try:
            with temporary_folder(self.folder):
                check_lock(self.folder)
        except OSError as error:
            raise unwritable(error, self.folder, needed=0, free=None, last=self.latest()) from error

    def refuse_others(self, identity: Mapping[str, str]) -> None:
        """OtherRunError where the folder holds checkpoints of another run. Touches nothing."""
        for one in checkpoints(self.folder):
            try:
                found = read_manifest(one.path).metadata.identity
            except (BadManifestError, OSError):
                continue  # whose it was cannot be known; it is never deleted, and opening it says what is wrong
            different = identity_differences(found, identity)
            if different:
                raise other_run(one.path, different)

    def begin(self, identity: Mapping[str, str], checkpoint: Checkpoint | None) -> tuple[str, ...]:
        """Claim the folder for a run that goes on from `checkpoint`, or begins at step 0.

        What a killed process has begun is ended as far as it is about checkpoints: see `unfinished`. Checkpoints after
        that step are set aside, never deleted. Returns what was done, for the user to see.
        """
        self.claim(identity)
        if self._ranks.rank != 0:
            return ()
        retired = self._end_retirement(identity, checkpoint)
        step, path = (-1, None) if checkpoint is None else (checkpoint.step, checkpoint.path.resolve())
        later = [
            one
            for one in checkpoints(self.folder)
            if one.step > step or (one.step == step and one.path.resolve() != path)
        ]
        try:
            notes = set_aside(self.folder, later)
        except OSError as error:
            raise unwritable(error, self.folder, needed=0, free=None, last=path) from error
        if path is not None and path.parent == self.folder.resolve():
            self._there.add(step)
        return (*retired, *notes)

    def _end_retirement(self, identity: Mapping[str, str], resumed: Checkpoint | None) -> tuple[str, ...]:
        """After a kill between a checkpoint and the deletion of those that it makes superfluous."""
        assert self._journal is not None, "the folder is claimed"
        there = {one.step for one in checkpoints(self.folder)}
        saved = there.intersection(self._journal.steps("saving"))
        if not saved and there.isdisjoint(self._journal.steps("retiring")):
            return ()
        protected = [*saved, *(() if resumed is None else (resumed.step,))]
        removal = remove_superfluous(
            self.folder, identity, self._keep_last, self._keep_every, protected, self._journal
        )  # fmt: skip
        self._journal.end("saving", *saved)
        self._journal.end("retiring", *(one.step for one in checkpoints(self.folder)))
        return removal.notes

    @property
    def is_writer(self) -> bool:
        """Of all ranks, the one that writes."""
        return self._ranks.rank == 0

    # -- what is begun and not ended (see `journal`) ------------------------------------------------------------------

    def begin_work(self, work: Work, step: int) -> None:
        if self._journal is not None:
            self._journal.begin(work, step)

    def end_work(self, work: Work, *steps: int) -> None:
        if self._journal is not None:
            self._journal.end(work, *steps)

    def unfinished(self, work: Work) -> tuple[int, ...]:
        """Of which steps. Before the folder is claimed: of whoever had it last, or has it now."""
        if self._journal is not None:
            return self._journal.steps(work)
        return tuple(sorted(read_journal(self.folder / LOCK_FILE)[work]))

    def write(self, step: int, pieces: Sequence[Piece], *, metadata: Metadata, per_rank: Sequence[Piece] = ()) -> Path:
        """Copy the state of all pieces, and write it in the background. Call it at a window's boundary, on all ranks.

        Waits for the write before it. Returns where the checkpoint will be; `finished` or `wait` say when it is.
        """
        check_names([piece.name for piece in (*pieces, *per_rank)])
        # All ranks take part in saving before rank 0 can fail.
        saved = {piece.name: piece.save() for piece in pieces}
        gathered = {piece.name: self._ranks.gather(_packed(piece.name, piece.save())) for piece in per_rank}
        target = self.folder / folder_name(step)
        if self._ranks.rank != 0:
            return target
        self.wait()
        self.claim(metadata.identity)
        try:
            is_there, is_taken = target.is_dir(), target.exists() or target.is_symlink()
        except OSError as error:
            raise unwritable(error, self.folder, needed=0, free=None, last=self._last_whole()) from error
        if step in self._there and is_there:
            self.end_work("saving", step)
            return target
        if is_taken:
            raise _occupied(target)
        needed = sum(saved_size(name, one) for name, one in saved.items())
        needed += sum(len(one) + 8192 for ranks in gathered.values() for one in ranks) + _MARGIN
        self.check_room(needed)
        begin = time.perf_counter()
        shared = {name: snapshot(name, one) for name, one in saved.items()}
        job = _Job(step, metadata, shared, gathered, needed, (time.perf_counter() - begin) * 1000)
        if self._executor is None:
            self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="gracetune-checkpoint")
        self._future = self._executor.submit(self._run, job)
        return target

    def check_room(self, needed: int, identity: Mapping[str, str] | None = None) -> None:
        """CheckpointFullError where the disk has not that many bytes left. `identity` as in `claim`, before that: then
        what a killed process left counts as free, because `claim` removes it."""
        free = self._free()
        if free is not None and identity is not None:
            free += left_bytes(self.folder)
        if free is not None and free < needed:
            last = self._last_whole(identity)
            safe = "there is no earlier checkpoint" if last is None else f"{last} is whole"
            raise full(f"no room for a checkpoint; {safe}", self.folder, found="", needed=needed, free=free)

    def wait(self) -> None:
        """Until everything handed to `write` is on the disk."""
        if self._future is None:
            return
        concurrent.futures.wait([self._future])
        future, self._future = self._future, None
        self._finished.append(future.result())

    def finished(self) -> tuple[Written, ...]:
        """What was completed since the last call; does not wait."""
        if self._future is not None and self._future.done():
            self.wait()
        done, self._finished = tuple(self._finished), []
        return done

    def close(self) -> None:
        """Waits; then the folder is free for others."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None
            if self._lock is not None:
                os.close(self._lock)
                self._lock = self._journal = None
            self._identity = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as second:
            error.add_note(f"and the last checkpoint was not written: {second}")

    # -- in the background --------------------------------------------------------------------------------------------

    def _run(self, job: _Job) -> Written:
        begin = time.perf_counter()
        target = self.folder / folder_name(job.step)
        try:
            size = self._write_whole(job, target)
        except OSError as error:
            free, last = self._free(), self._last_whole()
            raise unwritable(error, self.folder, needed=job.needed, free=free, last=last) from error
        write_ms = (time.perf_counter() - begin) * 1000
        self._there.add(job.step)
        assert self._journal is not None, "the folder is claimed"
        removal = remove_superfluous(
            self.folder, job.metadata.identity, self._keep_last, self._keep_every, (job.step,), self._journal
        )  # fmt: skip
        self._journal.end("saving", job.step)  # last: until then the next process ends the deletion
        return Written(job.step, target, size, job.snapshot_ms, write_ms, removal.removed, removal.notes)

    def _write_whole(self, job: _Job, target: Path) -> int:
        with new_folder(target, files_synced=True) as temporary:
            facts: dict[str, Fact] = {name: write_checksummed(temporary / name, parts) for name, parts in job.files()}
            manifest = Manifest(
                step=job.step,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                world_size=self._ranks.world_size,
                metadata=job.metadata,
                pieces=tuple(job.shared),
                per_rank_pieces=tuple(job.per_rank),
                files=facts,
            )
            last = write_checksummed(temporary / MANIFEST, [memoryview(manifest.as_bytes())])
        return last.size + sum(fact.size for fact in facts.values())

    def _free(self) -> int | None:
        """Before the folder is made, of the nearest one above it."""
        try:
            place = next((path for path in (self.folder, *self.folder.parents) if path.is_dir()), self.folder)
            return shutil.disk_usage(place).free
        except OSError:
            return None

    def _last_whole(self, identity: Mapping[str, str] | None = None) -> Path | None:
        """Told by its manifest: for a message, reading every byte would take too long."""
        own = self._identity or identity or {}
        ours = (one.path for one in reversed(checkpoints(self.folder)) if manifest_if_ours(one.path, own))
        return next(ours, None)


def _newest_whole(damaged: Path) -> Path | None:
    step = step_of(damaged.name)
    for one in reversed(checkpoints(damaged.parent)):
        if one.path != damaged and (step is None or one.step < step) and not isinstance(_whole(one.path), Damage):
            return one.path
    return None


def _whole(path: Path) -> Checkpoint | Damage:
    try:
        return verify(path)
    except CheckpointError as error:
        return Damage(MANIFEST, str(error))


def _occupied(target: Path) -> CheckpointError:
    hint = f"move it away (`mv {target} {target}.old`), or resume the run it belongs to"
    return CheckpointError(
        Problem("checkpoint not written", "something of this name is there", "a free name", hint, str(target))
    )


# -- a rank's own state, on its way to rank 0: length of the JSON (8 bytes), the JSON, the bytes of a safetensors file


def _packed(name: str, saved: Saved) -> bytes:
    piece = snapshot(name, saved)
    tensors = b"".join(file_pieces(piece.tensors)) if piece.tensors else b""
    return len(piece.json).to_bytes(8, "little") + piece.json + tensors


def _unpacked(packed: bytes) -> tuple[memoryview, memoryview]:
    view, length = memoryview(packed)[8:], int.from_bytes(packed[:8], "little")
    return view[:length], view[length:]
