"""The files of the queue: one JSON file per job, its log, and locks. They are the only state of the queue.

ROOT/.studio/queue/
    <id>.json      the job: its config, position, start and end; replaced atomically
    <id>.log       the output of its training process
    <id>.lock      locked by the training process for as long as it lives: it inherits the open file
    changes.lock   locked while jobs are changed
    runner.lock    locked by the one process that starts jobs
"""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gracetune.storage.atomic import write_file
from gracetune.storage.folders import make_private_folder
from gracetune.storage.locks import lock, open_lock_file
from gracetune.storage.regular_files import read_small_file

FORMAT: Final = "gracetune-queue-job"
VERSION: Final = 1
LARGEST_JOB = 1 << 20
_ID = re.compile(r"[0-9a-f]{12}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
EndState = Literal["done", "failed", "cancelled", "interrupted"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class JobStart(_Part):
    time_s: float
    pid: int | None = None
    """None until the process was started: the file is written before and after."""
    ticks: int | None = None
    """When the process was started, in clock ticks since the machine was. A reused process id has another one."""
    boot: str = ""
    gpu: str | None = None
    """The value of CUDA_VISIBLE_DEVICES; None on a machine without a GPU."""


class JobEnd(_Part):
    time_s: float
    state: EndState
    exit_code: int | None = None
    """None if no studio was there to see it."""
    why: str = ""


class QueuedJob(_Part):
    format: Literal["gracetune-queue-job"] = FORMAT
    version: Literal[1] = VERSION
    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    name: str
    config: str
    folder: str
    """The working folder of the training process, against which relative paths in the config are resolved."""
    output: str
    """The run's folder."""
    position: float
    """Jobs are started in the order of this number. It is not the place in the queue."""
    added_s: float
    start: JobStart | None = None
    end: JobEnd | None = None
    cancelled_s: float | None = None
    """When the user cancelled it. A running job ends later."""

    @property
    def is_waiting(self) -> bool:
        return self.start is None and self.end is None


class JobFiles:
    """Reads and writes the files. All changes happen inside `changing`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def jobs(self) -> list[QueuedJob]:
        """All readable jobs by position. Other files are ignored."""
        try:
            names = sorted(path.stem for path in self.folder.glob("*.json") if _ID.fullmatch(path.stem))
        except OSError:
            return []
        found = [job for name in names if (job := self._read(name)) is not None]
        return sorted(found, key=lambda job: (job.position, job.added_s, job.id))

    def _read(self, name: str) -> QueuedJob | None:
        try:
            job = QueuedJob.model_validate_json(read_small_file(self._path(name, "json"), LARGEST_JOB))
        except (OSError, ValidationError):
            return None
        return job if job.id == name else None

    def write(self, job: QueuedJob) -> None:
        write_file(self._path(job.id, "json"), f"{job.model_dump_json(indent=1)}\n".encode())

    def remove(self, job: QueuedJob) -> None:
        for kind in ("json", "log", "lock"):  # the job first: without it the others mean nothing
            self._path(job.id, kind).unlink(missing_ok=True)

    def log(self, job: QueuedJob) -> Path:
        return self._path(job.id, "log")

    def last_lines(self, job: QueuedJob, count: int) -> list[str]:
        """The end of the log. Progress lines that end with a carriage return count as lines."""
        try:
            with self.log(job).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 400 * count))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
        return lines[-count:]

    def new_id(self) -> str:
        return secrets.token_hex(6)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Exclude other threads and processes that change jobs."""
        make_private_folder(self.folder.parent)
        self.folder.mkdir(exist_ok=True)
        descriptor = open_lock_file(self.folder / "changes.lock")
        try:
            lock(descriptor, exclusive=True, wait=True)
            yield
        finally:
            os.close(descriptor)

    def take_runner_lock(self) -> int | None:
        """The open lock of the one process that starts jobs; None if another process has it."""
        with self.changing():
            descriptor = open_lock_file(self.folder / "runner.lock")
        if lock(descriptor, exclusive=True) == "busy":
            os.close(descriptor)
            return None
        return descriptor

    def is_runner_active(self) -> bool:
        return _is_locked(self.folder / "runner.lock")

    def open_job_lock(self, job: QueuedJob) -> int:
        """The open lock of a job, for its process to inherit."""
        descriptor = open_lock_file(self._path(job.id, "lock"))
        lock(descriptor, exclusive=True)
        return descriptor

    def is_alive(self, job: QueuedJob) -> bool:
        """Whether the job's process lives, whichever process started it."""
        if job.start is None or job.end is not None:
            return False
        if job.start.pid is None:  # the studio was killed while it started the process
            return _is_locked(self._path(job.id, "lock"))
        return process_of(job.start) is not None

    def _path(self, name: str, kind: str) -> Path:
        return self.folder / f"{name}.{kind}"


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return lock(descriptor, exclusive=False) == "busy"  # shared: two that look do not see each other
    finally:
        os.close(descriptor)


# -- processes --------------------------------------------------------------------------------------------------------


def boot_id() -> str:
    """Differs after every start of the machine; empty if unknown."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def ticks_of(pid: int) -> int | None:
    """The start time of a living process; None if there is none. A zombie has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text.rpartition(b")")[2].split()  # the program's name before it may contain anything
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def process_of(start: JobStart) -> int | None:
    """The id of the process if it still lives and is the same one."""
    same_boot = start.boot == boot_id()
    return start.pid if same_boot and start.pid and ticks_of(start.pid) == start.ticks else None


def ask_to_stop(start: JobStart) -> bool:
    """Send SIGTERM to the process: it completes its step and saves. False if it has ended."""
    if start.pid is None:
        return False
    try:
        descriptor = os.pidfd_open(start.pid)  # from here on the id cannot come to mean another process
    except OSError:
        return False
    try:
        if process_of(start) is None:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True
