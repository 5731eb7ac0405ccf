"""Many files at a time, by what takes the time: waiting for the storage, or working on what came from there.

One thread while the storage answers at once. Several would only pass the interpreter's lock around, which on two cores
takes longer than on one. Several threads where files are waited for: a cold disk, a network mount, a server. Further
processes where there is much to work on: each has an interpreter of its own. They are new processes, not forked ones,
because a process that has opened CUDA must not fork.

A further process reads JSON lines and answers with one for each: first what it reads from, [handle, kind, threads]
(backends/handle.py), then lists of [path, size]. An answer is a list with [digest, facts] or a reason for each file.
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
from gracetune.data.backends.handle import BackendHandle, StagedHandle, from_json, to_json
from gracetune.data.backends.in_memory import InMemoryBackend, attach
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.shared import Storage
from gracetune.data.media import Kind
from gracetune.data.media.image import BOMBS_UNSAID
from gracetune.data.media_files import MediaFile, examine, facts_as_json, facts_from_json

Given = TypeVar("Given")
Result = TypeVar("Result")
File = tuple[str, int]
"""Its path and its size."""
Examined = MediaFile | str

ALONE: Final = 8
"""Files that one thread works on before it looks whether it had to wait for them."""
WAITING: Final = 1024
"""Files that several threads work on before one of them tries alone again."""
MOST_PROCESSES: Final = 8
WORTH_SECONDS: Final = 2.0
"""Work left that is worth starting processes: each is busy for about half a second before its first file."""
PATIENCE: Final = 60.0
"""Seconds that a process may take for a lot; or ten times what one takes here. Then its lot is done here."""
_LAST_WAIT: Final = 5.0
"""Seconds for a killed process to end. One that waits for a dead disk may not."""
_LOT: Final = 128
"""Files that are handed to a process at a time."""


@dataclass
class Threads(Generic[Given, Result]):
    """Calls a function for each of many files, in their order."""

    work: Callable[[Given], Result]
    threads: int
    waits: bool = False
    """Whether the last files that one thread worked on alone had to be waited for."""

    def map(self, items: Sequence[Given]) -> Iterator[Result]:
        place, pool = 0, None
        with ExitStack() as stack:
            while place < len(items):
                some = items[place : place + ALONE]
                before = _times_blocked()
                done = [*map(self.work, some)]
                self.waits = 2 * (_times_blocked() - before) >= len(some)
                yield from done
                place += ALONE
                if self.waits and self.threads > 1:
                    if pool is None:
                        pool = stack.enter_context(ThreadPoolExecutor(self.threads, thread_name_prefix="files"))
                    yield from pool.map(self.work, items[place : place + WAITING])
                    place += WAITING


def _times_blocked() -> int:
    """How often this thread gave its core away to wait. That it was taken from it, by other work, does not count."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def examine_files(
    backend: Backend, kind: Kind, files: Sequence[File], *, threads: int, on_done: Callable[[int], None]
) -> dict[str, Examined]:
    """What each file is, or why it cannot be read. `on_done` gets how many are done, in the calling thread."""
    results: dict[str, Examined] = {}
    lots = deque([*files[place : place + _LOT]] for place in range(0, len(files), _LOT))
    own = Threads[File, Examined](lambda file: examine(backend, file[0], kind, file[1]), threads)
    helpers: list[_Helper] = []
    asked_for_help = False
    began = time.perf_counter()
    try:
        while lots:
            lot = _take(lots)
            while own.waits and len(lot) < ALONE + WAITING and (more := _take(lots)):
                lot += more
            with BOMBS_UNSAID:  # not for each file: changing the filters for warnings takes time
                results.update(zip((path for path, _ in lot), own.map(lot), strict=True))
            on_done(len(results))
            if not asked_for_help and not own.waits:
                each = (time.perf_counter() - began) / len(results)
                if each * (len(files) - len(results)) > WORTH_SECONDS:
                    asked_for_help = True
                    # No descriptor, memory, process or thread left for another one: those that have started do it.
                    with suppress(OSError, RuntimeError):
                        helpers.extend(_Helper(opening, lots, results) for opening in _openings(backend, kind, threads))
            if not lots:
                each = (time.perf_counter() - began) / len(results)
                for helper in helpers:
                    helper.join(max(PATIENCE, 10 * each * _LOT))  # the lot of one that has failed is there again
                on_done(len(results))
    finally:
        for helper in helpers:
            helper.close()
    return results


def _take(lots: deque[list[File]]) -> list[File]:
    """The next lot; an empty one where another thread has just taken the last."""
    try:
        return lots.popleft()
    except IndexError:
        return []


def _openings(backend: Backend, kind: Kind, threads: int) -> list[str]:
    """The first line for each further process; none where there is one core, or no other process can read the files."""
    if type(backend) is not LocalBackend and type(backend) is not InMemoryBackend:
        return []
    count = min(len(os.sched_getaffinity(0)), MOST_PROCESSES) - 1
    return [json.dumps([to_json(backend.handle()), kind, threads])] * count


class _Helper:
    """A further process, and the thread that hands it lots and takes its answers.

    One that fails (its memory is short, it was killed, it hangs) gives its lot back: this process is then only slower.
    """

    def __init__(self, opening: str, lots: deque[list[File]], results: dict[str, Examined]) -> None:
        self._lots, self._results = lots, results
        self._since = time.monotonic()
        """Since when it works on its lot."""
        self._lot: list[File] = []
        self._is_given_up = False
        self._kind: Kind = json.loads(opening)[1]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._hand_out, args=(opening,), name="scan", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there is no room for another thread
            self._process.kill()
            self._process.communicate()
            raise

    def join(self, patience: float) -> None:
        """Wait until there are no lots left; end it where it takes that many seconds for one."""
        while self._thread.is_alive():
            left = self._since + patience - time.monotonic()
            if left <= 0:
                self._give_up()
                return
            self._thread.join(left)

    def _give_up(self) -> None:
        self._process.kill()
        self._thread.join(_LAST_WAIT)
        if self._thread.is_alive():
            self._is_given_up = True
            self._lots.append(self._lot)

    def close(self) -> None:
        self._process.kill()
        self._thread.join(_LAST_WAIT)
        if not self._thread.is_alive():  # else it still reads from a pipe
            with suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=_LAST_WAIT)  # closes the pipes, and waits

    def _hand_out(self, opening: str) -> None:
        with suppress(OSError, ValueError):  # it has failed
            self._send(opening)
            while not self._is_given_up and (lot := _take(self._lots)):
                self._lot, self._since = lot, time.monotonic()
                found = None
                try:
                    found = self._examine(lot)
                    self._results.update(zip((path for path, _ in lot), found, strict=True))
                finally:
                    if found is None and not self._is_given_up:
                        self._lots.append(lot)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def _examine(self, lot: list[File]) -> list[Examined]:
        assert self._process.stdout is not None
        self._send(json.dumps(lot))
        answers = json.loads(self._process.stdout.readline())
        return [
            found if isinstance(found, str) else MediaFile(path, size, found[0], facts_from_json(self._kind, found[1]))
            for (path, size), found in zip(lot, answers, strict=True)
        ]


def answer_lines() -> None:
    """What a further process does, until its input ends."""
    lines = sys.stdin.buffer
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
        handle, kind, threads = json.loads(lines.readline())
        with _open(from_json(handle)) as backend, BOMBS_UNSAID:
            workers = Threads[File, Examined](lambda file: examine(backend, file[0], kind, file[1]), threads)
            for line in lines:
                found = [_answer(one) for one in workers.map(json.loads(line))]
                answers.write(f"{json.dumps(found)}\n".encode())
                answers.flush()


def _open(handle: BackendHandle) -> Storage:
    """Only what `_openings` hands out. Not `attach_backend`: what that imports takes as long as hundreds of files."""
    return attach(handle) if isinstance(handle, StagedHandle) else LocalBackend(handle.root)


def _answer(found: Examined) -> Any:
    return found if isinstance(found, str) else [found.digest, facts_as_json(found.facts)]


_PROGRAM: Final = (
    f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import {answer_lines.__name__} as answer; answer()"
)
"""With the path of this process, before anything is imported: the current folder may hold files that are called like
modules."""
