"""The checkpoint store of a run: writes checkpoints atomically in the background, and deletes old ones."""

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

from gracetune.checkpoint.errors import CheckpointError, DamagedCheckpointError, disk_full_error, write_error
from gracetune.checkpoint.folder import (
    LOCK_FILE,
    Journal,
    Work,
    check_lock,
    checkpoints,
    manifest_if_ours,
    read_journal,
    remove_superfluous,
    set_aside,
    take_lock,
    temporary_folder,
)
from gracetune.checkpoint.manifest import (
    MANIFEST,
    BadManifestError,
    CheckpointManifest,
    Fact,
    Metadata,
    file_stem,
    folder_name,
    identity_differences,
    read_manifest,
    step_of,
    write_checksummed,
)
from gracetune.checkpoint.reading import Checkpoint, Damage, other_run, verify
from gracetune.checkpoint.state_parts import (
    CheckpointPart,
    OneProcess,
    Ranks,
    SavedState,
    StateSnapshot,
    check_names,
    saved_size,
    snapshot,
)
from gracetune.errors import Problem
from gracetune.storage.atomic import leftover_bytes, new_folder, sweep_folders
from gracetune.storage.safetensors_files import file_chunks
from gracetune.units import MIB

_MARGIN = MIB
"""Disk space for the manifest, folder entries, and data that other processes write meanwhile."""


@dataclass(frozen=True)
class WrittenCheckpoint:
    """A checkpoint that is completely on the disk."""

    step: int
    path: Path
    size: int
    """Bytes of all its files."""
    snapshot_ms: float
    """How long the run was blocked for copying."""
    write_ms: float
    """How long writing in the background took."""
    removed: tuple[str, ...]
    """Names of older checkpoints that were deleted."""
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Job:
    """A checkpoint to write in the background."""

    step: int
    metadata: Metadata
    shared: Mapping[str, StateSnapshot]
    per_rank: Mapping[str, Sequence[bytes]]
    needed: int
    """Bytes on the disk, an upper bound."""
    snapshot_ms: float
    in_place: bool
    """The run waits until it is written."""

    def files(self) -> Iterator[tuple[str, Iterator[memoryview]]]:
        for name, part in self.shared.items():
            yield f"{name}.json", iter([memoryview(part.json)])
            if part.tensors:
                yield f"{name}.safetensors", file_chunks(part.tensors)
        for name, ranks in self.per_rank.items():
            for rank, packed in enumerate(ranks):
                stem, (json, tensors) = file_stem(name, rank), _unpacked(packed)
                yield f"{stem}.json", iter([json])
                if tensors:
                    yield f"{stem}.safetensors", iter([tensors])


class CheckpointStore:
    """All ranks create a store and make the same calls of `write`. Only rank 0 writes, in one background thread.

    Errors of the background thread are raised by the next call of `write`, `wait`, `finished` or `close`.
    """

    def __init__(
        self, folder: Path, keep_last: int, keep_every: int | None = None, *, ranks: Ranks | None = None
    ) -> None:
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"keep_last and keep_every must be at least 1, not {keep_last} and {keep_every}")
        self.folder = folder.expanduser().absolute()
        self._keep_last, self._keep_every = keep_last, keep_every
        self._ranks = OneProcess() if ranks is None else ranks
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._future: concurrent.futures.Future[WrittenCheckpoint] | None = None
        self._finished: list[WrittenCheckpoint] = []
        self._lock: int | None = None
        self._journal: Journal | None = None
        self._identity: dict[str, str] | None = None
        self._written: set[int] = set()
        """Steps whose checkpoint exists with exactly the content that `write` would write again."""

    # -- reading ------------------------------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """The newest checkpoint, intact or damaged. Incomplete ones do not count."""
        found = checkpoints(self.folder)
        return found[-1].path if found else None

    def open(self, path: Path) -> Checkpoint:
        """Verify and open a checkpoint. The error for a damaged one names the newest intact one before it."""
        found = verify(path)
        if isinstance(found, Checkpoint):
            return found
        intact = _newest_intact(path)
        hint = "no earlier checkpoint is intact: start from step 0 with --resume none"
        if intact is not None:
            hint = f"--resume {intact}; the damaged one is kept under another name"
        raise DamagedCheckpointError(
            Problem(
                f"damaged checkpoint, file {found.file}",
                found.found,
                "the bytes that were written; check the disk (`dmesg`, `smartctl -a`)",
                hint,
                str(path),
            )
        )

    # -- writing ------------------------------------------------------------------------------------------------------

    def claim(self, identity: Mapping[str, str]) -> None:
        """Create and lock the folder for this run, and remove incomplete checkpoints of killed processes.

        Raises OtherRunError if it contains checkpoints of another run, BusyFolderError if another process writes to it.
        """
        if self._ranks.rank != 0:
            return
        if self._identity is not None:
            different = identity_differences(self._identity, identity)
            if different:
                raise ValueError(f"one store cannot serve two runs: {'; '.join(different)}")
            return
        self.reject_others(identity)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock, locked = take_lock(self.folder)
            self._journal = Journal(self._lock, is_fresh=not locked)
            if locked:
                sweep_folders(self.folder)
        except OSError as error:
            raise write_error(error, self.folder, needed=0, free=None, last=self.latest()) from error
        self._identity = dict(identity)

    def check_claim(self) -> None:
        """Raise the errors that `claim` would raise, except OtherRunError. Changes nothing."""
        if self._ranks.rank != 0:
            return
        try:
            with temporary_folder(self.folder):
                check_lock(self.folder)
        except OSError as error:
            raise write_error(error, self.folder, needed=0, free=None, last=self.latest()) from error

    def reject_others(self, identity: Mapping[str, str]) -> None:
        """Raise OtherRunError if the folder contains checkpoints of another run. Changes nothing."""
        for one in checkpoints(self.folder):
            try:
                found = read_manifest(one.path).metadata.identity
            except (BadManifestError, OSError):
                continue  # its run is unknown: it is never deleted, and opening it reports the damage
            different = identity_differences(found, identity)
            if different:
                raise other_run(one.path, different)

    def begin(self, identity: Mapping[str, str], checkpoint: Checkpoint | None) -> tuple[str, ...]:
        """Claim the folder for a run that resumes from `checkpoint`, or starts at step 0.

        Completes deletions that a killed process had started. Renames checkpoints of later steps, which are never
        deleted. Returns notes for the user.
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
            raise write_error(error, self.folder, needed=0, free=None, last=path) from error
        if path is not None and path.parent == self.folder.resolve():
            self._written.add(step)
        return (*retired, *notes)

    def _end_retirement(self, identity: Mapping[str, str], resumed: Checkpoint | None) -> tuple[str, ...]:
        """Complete the deletion of old checkpoints, if a process was killed after saving a new one."""
        assert self._journal is not None, "the folder is claimed"
        existing = {one.step for one in checkpoints(self.folder)}
        saved = existing.intersection(self._journal.steps("saving"))
        if not saved and existing.isdisjoint(self._journal.steps("retiring")):
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
        """Whether this rank writes checkpoints."""
        return self._ranks.rank == 0

    # -- unfinished operations (see `journal`) ------------------------------------------------------------------------

    def begin_work(self, work: Work, step: int) -> None:
        if self._journal is not None:
            self._journal.begin(work, step)

    def end_work(self, work: Work, *steps: int) -> None:
        if self._journal is not None:
            self._journal.end(work, *steps)

    def unfinished(self, work: Work) -> tuple[int, ...]:
        """The steps of unfinished operations. Before `claim`, those of the last or current owner of the folder."""
        if self._journal is not None:
            return self._journal.steps(work)
        return tuple(sorted(read_journal(self.folder / LOCK_FILE)[work]))

    def write(
        self, step: int, parts: Sequence[CheckpointPart], *, metadata: Metadata, per_rank: Sequence[CheckpointPart] = ()
    ) -> Path:
        """Copy the state of all parts and write it in the background. Call it on all ranks, between optimizer steps.

        Waits for the previous write, and for this one if a part is not copied (`SavedState.in_place`). A step that is
        on the disk already is not written again. Returns the path of the checkpoint. Use `finished` or `wait` for its
        completion.
        """
        check_names([part.name for part in (*parts, *per_rank)])
        # Saving and gathering are collective, so they come before anything that can fail on rank 0 only.
        saved = {part.name: part.save() for part in parts}
        gathered = {part.name: self._ranks.gather(_packed(part.name, part.save())) for part in per_rank}
        target = self.folder / folder_name(step)
        if self._ranks.rank != 0:
            return target
        self.wait()
        self.claim(metadata.identity)
        try:
            is_folder, is_taken = target.is_dir(), target.exists() or target.is_symlink()
        except OSError as error:
            raise write_error(error, self.folder, needed=0, free=None, last=self._last_complete()) from error
        if step in self._written and is_folder:
            self.end_work("saving", step)
            return target
        if is_taken:
            raise _occupied(target)
        needed = sum(saved_size(name, one) for name, one in saved.items())
        needed += sum(len(one) + 8192 for ranks in gathered.values() for one in ranks) + _MARGIN
        self.check_room(needed)
        begin = time.perf_counter()
        shared = {name: snapshot(name, one) for name, one in saved.items()}
        in_place = any(one.in_place for one in saved.values())
        job = _Job(step, metadata, shared, gathered, needed, (time.perf_counter() - begin) * 1000, in_place)
        if self._executor is None:
            self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="gracetune-checkpoint")
        self._future = self._executor.submit(self._run, job)
        if in_place:
            self.wait()
        return target

    def check_room(self, needed: int, identity: Mapping[str, str] | None = None) -> None:
        """Raise CheckpointFullError if the disk has fewer than `needed` bytes free.

        Before `claim`, pass the `identity` for it: leftovers of killed processes then count as free, because `claim`
        removes them.
        """
        free = self._free()
        if free is not None and identity is not None:
            free += leftover_bytes(self.folder)
        if free is not None and free < needed:
            last = self._last_complete(identity)
            safe = "there is no earlier checkpoint" if last is None else f"{last} is complete"
            key = f"not enough disk space for a checkpoint; {safe}"
            raise disk_full_error(key, self.folder, found="", needed=needed, free=free)

    def wait(self) -> None:
        """Wait until the pending write has finished."""
        if self._future is None:
            return
        concurrent.futures.wait([self._future])
        future, self._future = self._future, None
        self._finished.append(future.result())

    def finished(self) -> tuple[WrittenCheckpoint, ...]:
        """The checkpoints completed since the last call. Does not wait."""
        if self._future is not None and self._future.done():
            self.wait()
        done, self._finished = tuple(self._finished), []
        return done

    def close(self) -> None:
        """Wait for the pending write, then release the folder."""
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
            error.add_note(f"the last checkpoint was not written either: {second}")

    # -- in the background --------------------------------------------------------------------------------------------

    def _run(self, job: _Job) -> WrittenCheckpoint:
        begin = time.perf_counter()
        target = self.folder / folder_name(job.step)
        try:
            size = self._write_folder(job, target)
        except OSError as error:
            free, last = self._free(), self._last_complete()
            raise write_error(error, self.folder, needed=job.needed, free=free, last=last) from error
        write_ms = (time.perf_counter() - begin) * 1000
        self._written.add(job.step)
        assert self._journal is not None, "the folder is claimed"
        removal = remove_superfluous(
            self.folder, job.metadata.identity, self._keep_last, self._keep_every, (job.step,), self._journal
        )  # fmt: skip
        # Last, so that after a kill before this point the next process completes the deletion.
        self._journal.end("saving", job.step)
        waited_ms = job.snapshot_ms + (write_ms if job.in_place else 0)
        return WrittenCheckpoint(job.step, target, size, waited_ms, write_ms, removal.removed, removal.notes)

    def _write_folder(self, job: _Job, target: Path) -> int:
        """Write the checkpoint's folder and return the size of its files."""
        with new_folder(target, files_synced=True) as temporary:
            facts: dict[str, Fact] = {name: write_checksummed(temporary / name, parts) for name, parts in job.files()}
            manifest = CheckpointManifest(
                step=job.step,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                world_size=self._ranks.world_size,
                metadata=job.metadata,
                parts=tuple(job.shared),
                per_rank_parts=tuple(job.per_rank),
                files=facts,
            )
            last = write_checksummed(temporary / MANIFEST, [memoryview(manifest.as_bytes())])
        return last.size + sum(fact.size for fact in facts.values())

    def _free(self) -> int | None:
        """Free bytes on the disk. If the folder does not exist yet, its nearest existing parent is used."""
        try:
            existing = next((path for path in (self.folder, *self.folder.parents) if path.is_dir()), self.folder)
            return shutil.disk_usage(existing).free
        except OSError:
            return None

    def _last_complete(self, identity: Mapping[str, str] | None = None) -> Path | None:
        """The newest checkpoint of this run with a valid manifest. For a message, verifying all bytes is too slow."""
        own = self._identity or identity or {}
        ours = (one.path for one in reversed(checkpoints(self.folder)) if manifest_if_ours(one.path, own))
        return next(ours, None)


def _newest_intact(damaged: Path) -> Path | None:
    """The newest intact checkpoint before a damaged one."""
    step = step_of(damaged.name)
    for one in reversed(checkpoints(damaged.parent)):
        if one.path != damaged and (step is None or one.step < step) and not isinstance(_checked(one.path), Damage):
            return one.path
    return None


def _checked(path: Path) -> Checkpoint | Damage:
    try:
        return verify(path)
    except CheckpointError as error:
        return Damage(MANIFEST, str(error))


def _occupied(target: Path) -> CheckpointError:
    hint = f"move it away (`mv {target} {target}.old`), or resume the run that it belongs to"
    return CheckpointError(
        Problem("checkpoint not written", "a file or folder of this name", "an unused name", hint, str(target))
    )


# -- the state of one rank, as bytes for rank 0: length of the JSON (8 bytes), the JSON, a safetensors file


def _packed(name: str, saved: SavedState) -> bytes:
    part = snapshot(name, saved)
    tensors = b"".join(file_chunks(part.tensors)) if part.tensors else b""
    return len(part.json).to_bytes(8, "little") + part.json + tensors


def _unpacked(packed: bytes) -> tuple[memoryview, memoryview]:
    """The JSON, and the safetensors file, which is empty without tensors."""
    view, length = memoryview(packed)[8:], int.from_bytes(packed[:8], "little")
    return view[:length], view[length:]
