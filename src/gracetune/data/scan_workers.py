"""Examining many files in parallel. The number of threads and processes adapts to the bottleneck.

- One thread while the storage answers immediately: several would only compete for Python's global interpreter lock.
- Several threads while the storage is slow: a cold disk, a network mount, a server.
- Additional processes if much CPU work is left, because each has its own interpreter lock. They are started, not
  forked, because a process that has initialized CUDA must not fork.

A worker process reads JSON lines and answers each with one line. The first line is [handle, kind, threads], where
`handle` describes the backend (backends/storage.py). Each further line is a list of [path, size]. The answer to it is a
list that holds for each file either [digest, facts] or the reason why it is unreadable.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from gracetune.data.backend import Backend
from gracetune.data.backends.in_memory import InMemoryBackend, attach
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.storage import BackendHandle, StagedHandle, Storage, from_json, to_json
from gracetune.data.media import Kind
from gracetune.data.media.image import NO_BOMB_WARNINGS
from gracetune.data.media_files import MediaFile, examine, facts_as_json, facts_from_json

Given = TypeVar("Given")
Result = TypeVar("Result")
File = tuple[str, int]
"""Path and size."""
Examined = MediaFile | str
"""The result for one file: its properties, or why it is unreadable."""

ALONE: Final = 8
"""Files that one thread processes before it checks whether it had to wait for storage."""
WAITING: Final = 1024
"""Files that several threads process before a single thread is tried again."""
MOST_PROCESSES: Final = 8
WORTH_SECONDS: Final = 2.0
"""Start worker processes if at least this much work is left. A process needs about half a second to start."""
PATIENCE: Final = 60.0
"""Seconds a worker process may take for a batch of files, or ten times what a batch takes here if that is longer. After
that the batch is processed here."""
_LAST_WAIT: Final = 5.0
"""Seconds to wait for a killed process to end. A process blocked by a dead disk may not end at all."""
_BATCH: Final = 128
"""Files that are sent to a worker process at a time."""


@dataclass
class Threads(Generic[Given, Result]):
    """Maps a function over files in order. It uses several threads only while the storage is slow."""

    work: Callable[[Given], Result]
    threads: int
    waits: bool = False
    """Whether the last files that a single thread processed had to be waited for."""

    def map(self, items: Sequence[Given]) -> Iterator[Result]:
        position, pool = 0, None
        with ExitStack() as stack:
            while position < len(items):
                some = items[position : position + ALONE]
                before = _times_blocked()
                done = [*map(self.work, some)]
                self.waits = 2 * (_times_blocked() - before) >= len(some)  # blocked for at least half of the files
                yield from done
                position += ALONE
                if self.waits and self.threads > 1:
                    if pool is None:
                        pool = stack.enter_context(ThreadPoolExecutor(self.threads, thread_name_prefix="files"))
                    yield from pool.map(self.work, items[position : position + WAITING])
                    position += WAITING


def _times_blocked() -> int:
    """How often this thread blocked, for example on I/O: its voluntary context switches. Preemption does not count."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def examine_files(
    backend: Backend, kind: Kind, files: Sequence[File], *, threads: int, on_done: Callable[[int], None]
) -> dict[str, Examined]:
    """The result for each file. `on_done` is called in this thread with the number of files done."""
    results: dict[str, Examined] = {}
    batches = deque([*files[begin : begin + _BATCH]] for begin in range(0, len(files), _BATCH))
    own = Threads[File, Examined](lambda file: examine(backend, file[0], kind, file[1]), threads)
    workers: list[_Worker] = []
    has_started_workers = False
    began = time.perf_counter()
    try:
        while batches:
            batch = _take(batches)
            # While the storage is slow, join batches so that the threads stay busy.
            while own.waits and len(batch) < ALONE + WAITING and (more := _take(batches)):
                batch += more
            with NO_BOMB_WARNINGS:  # once per batch, because changing the warning filters takes time
                results.update(zip((path for path, _ in batch), own.map(batch), strict=True))
            on_done(len(results))
            if not has_started_workers and not own.waits:
                seconds_each = (time.perf_counter() - began) / len(results)
                if seconds_each * (len(files) - len(results)) > WORTH_SECONDS:
                    has_started_workers = True
                    # If the system has no room for another process or thread, continue with those that started.
                    with suppress(OSError, RuntimeError):
                        workers.extend(
                            _Worker(opening, batches, results) for opening in _openings(backend, kind, threads)
                        )
            if not batches:
                seconds_each = (time.perf_counter() - began) / len(results)
                for worker in workers:
                    # A worker that fails puts its batch back, and the loop continues with it.
                    worker.join(max(PATIENCE, 10 * seconds_each * _BATCH))
                on_done(len(results))
    finally:
        for worker in workers:
            worker.close()
    return results


def _take(batches: deque[list[File]]) -> list[File]:
    """The next batch; an empty one if another thread has just taken the last."""
    try:
        return batches.popleft()
    except IndexError:
        return []


def _openings(backend: Backend, kind: Kind, threads: int) -> list[str]:
    """The first line for each worker process. Empty with a single core, or if other processes cannot read the files."""
    if type(backend) is not LocalBackend and type(backend) is not InMemoryBackend:
        return []
    count = min(len(os.sched_getaffinity(0)), MOST_PROCESSES) - 1
    return [json.dumps([to_json(backend.handle()), kind, threads])] * count


class _Worker:
    """A worker process, and a thread that sends it batches and reads its answers.

    If it fails (out of memory, killed, hanging), its batch goes back to the queue, and the scan only becomes slower.
    """

    def __init__(self, opening: str, batches: deque[list[File]], results: dict[str, Examined]) -> None:
        self._batches, self._results = batches, results
        self._since = time.monotonic()
        """When it started its current batch."""
        self._batch: list[File] = []
        self._is_given_up = False
        self._kind: Kind = json.loads(opening)[1]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._hand_out, args=(opening,), name="scan", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system cannot start another thread
            self._process.kill()
            self._process.communicate()
            raise

    def join(self, patience: float) -> None:
        """Wait until no batches are left. Kill the process if it takes more than `patience` seconds for one."""
        while self._thread.is_alive():
            left = self._since + patience - time.monotonic()
            if left <= 0:
                self._give_up()
                return
            self._thread.join(left)

    def _give_up(self) -> None:
        self._process.kill()
        self._thread.join(_LAST_WAIT)
        if self._thread.is_alive():  # the process did not end, so the thread still waits for its answer
            self._is_given_up = True
            self._batches.append(self._batch)

    def close(self) -> None:
        self._process.kill()
        self._thread.join(_LAST_WAIT)
        if not self._thread.is_alive():  # otherwise the thread still reads from a pipe
            with suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=_LAST_WAIT)  # closes the pipes and waits

    def _hand_out(self, opening: str) -> None:
        with suppress(OSError, ValueError):  # the process has failed: a broken pipe or an incomplete answer
            self._send(opening)
            while not self._is_given_up and (batch := _take(self._batches)):
                self._batch, self._since = batch, time.monotonic()
                found = None
                try:
                    found = self._examine(batch)
                    self._results.update(zip((path for path, _ in batch), found, strict=True))
                finally:
                    if found is None and not self._is_given_up:
                        self._batches.append(batch)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def _examine(self, batch: list[File]) -> list[Examined]:
        assert self._process.stdout is not None
        self._send(json.dumps(batch))
        answers = json.loads(self._process.stdout.readline())
        return [
            found if isinstance(found, str) else MediaFile(path, size, found[0], facts_from_json(self._kind, found[1]))
            for (path, size), found in zip(batch, answers, strict=True)
        ]


def answer_lines() -> None:
    """The main function of a worker process. It answers lines until its input ends."""
    lines = sys.stdin.buffer
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps library output out of the answers
        handle, kind, threads = json.loads(lines.readline())
        with _open(from_json(handle)) as backend, NO_BOMB_WARNINGS:
            workers = Threads[File, Examined](lambda file: examine(backend, file[0], kind, file[1]), threads)
            for line in lines:
                found = [_answer(one) for one in workers.map(json.loads(line))]
                answers.write(f"{json.dumps(found)}\n".encode())
                answers.flush()


def _open(handle: BackendHandle) -> Storage:
    """Open the backends that `_openings` allows. `attach_backend` would import far more than a worker needs."""
    return attach(handle) if isinstance(handle, StagedHandle) else LocalBackend(handle.root)


def _answer(found: Examined) -> Any:
    return found if isinstance(found, str) else [found.digest, facts_as_json(found.facts)]


_PROGRAM: Final = (
    f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import {answer_lines.__name__} as answer; answer()"
)
"""The worker's program. It sets `sys.path` to that of this process before importing anything else, because the current
folder may hold files with the names of modules."""
