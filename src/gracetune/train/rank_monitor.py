"""Monitor the other processes of a run: which are alive, why others ended, and for which this one waits.

If a peer has ended, a collective fails with a message about a socket, or (NCCL) does not return at all. Every process
therefore writes to the launcher's `torch.distributed.Store`: its process id, a heartbeat every second, and why it ends.
A process whose collective fails reads there which rank was lost (`RankMonitor.explain`). Background threads read it,
too. If a peer is lost and the main thread does not notice it within `GRACE_S`, whatever it does, they end this process.

Keys in the store: `peer/<rank>/process`, `peer/<rank>/beat` ("<beat> <collectives begun>"), `peer/<rank>/end`, and the
counter `peer/failures`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from gracetune.errors import GracetuneError
from gracetune.train.control import InterruptedBySignal
from gracetune.units import format_duration

BEAT_S = 1.0
"""Seconds between heartbeats; longer from 128 ranks on."""
SILENT_BEATS = 300
"""A peer without a heartbeat during this many of our own is lost. Beats are counted, not timed, because a scheduler may
suspend all processes of a job for an hour. The number is large, because a thread cannot beat while another one holds
Python's lock."""
GRACE_S = 15.0
"""How long the main thread may take to notice a lost peer by itself."""
SETTLED_S = 5.0
"""How long after a failed collective a dead process may still look alive."""
REPORT_EVERY_S = {True: 60.0, False: 600.0}
"""Waiting is reported after this time, on rank 0 (True) and on the others (False), and whenever it has doubled."""


class LostRankError(GracetuneError):
    """Another process of the run has ended, so this one cannot go on."""

    def __init__(self, message: str, lost: Sequence[int], *, reports: bool) -> None:
        """`reports`: this rank reports how to resume, and writes the end of the run to the log."""
        super().__init__(message)
        self.lost, self.reports = tuple(lost), reports


@dataclass(frozen=True)
class _Process:
    """The process of one rank."""

    host: str
    machine: str
    """Host and PID namespace: equal for processes that see each other in /proc."""
    pid: int
    started: str
    """The kernel's start time of the process. With it, a reused pid is not taken for the same process."""

    @classmethod
    def this(cls) -> _Process:
        name, pid = socket.gethostname(), os.getpid()
        return cls(name, f"{name} {Path('/proc/self/ns/pid').readlink()}", pid, _state(pid)[1])

    def is_gone(self) -> bool:
        try:
            state, started = _state(self.pid)
        except OSError:
            return True
        return state in "ZX" or started != self.started

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def _state(pid: int) -> tuple[str, str]:
    """The state letter (Z: zombie, X: dead) and the start time: fields 3 and 22 of /proc/<pid>/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]


@dataclass(frozen=True)
class _End:
    """The message that a rank leaves in the store when it ends with an error."""

    number: int
    """Its place in the order in which ranks failed. The first failure is the cause."""
    reason: str
    interrupted: bool
    lost: tuple[int, ...]
    """The ranks that it found lost."""
    is_clear: bool
    """Whether `reason` is a cause. An error of a collective is only an effect."""


class RankMonitor:
    """Watches the other ranks from two threads, and explains errors of collectives.

    `advice` returns the end of a message about a lost rank: the last checkpoint, and the command that resumes.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, store_in_rank_0: bool) -> None:
        """`store` is a `torch.distributed.Store`, served by rank 0's process or by the launcher.

        Every rank makes a monitor. A barrier must follow before `start`.
        """
        self.rank, self.world_size = rank, world_size
        self._store_in_rank_0 = store_in_rank_0
        self.advice: Callable[[], str] = lambda: ""
        self.on_forced_end: Callable[[LostRankError], None] = lambda error: None
        """Called before a thread ends the process, so that the run's log can be completed."""
        self._opened = store  # kept open until `close`, whatever becomes of the process group
        self._store, self._threads_store = store.clone(), store.clone()
        for one in (self._store, self._threads_store):
            one.set_timeout(timedelta(seconds=10))
        self._collectives, self._since = 0, 0.0
        """Number of collectives begun, and the time at which the current one began (0.0: none)."""
        self._explanation: BaseException | None = None
        self._failure_number = 0
        self._this = _Process.this()
        self._failing, self._closing = threading.Event(), threading.Event()
        self._store.set(f"peer/{rank}/process", json.dumps(asdict(self._this)))
        self._store.set(f"peer/{rank}/beat", "0 0")
        self._processes: dict[int, _Process] = {}
        self._seen = _Seen()
        self._has_store = threading.Event()
        self._has_store.set()
        self._threads = [
            threading.Thread(target=work, name=f"gracetune-peers-{work.__name__}", daemon=True)
            for work in (self._beat, self._watch)
        ]

    def start(self) -> None:
        """Start the threads. Call this after the barrier, when all ranks have written their entries."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        self._processes = {rank: _Process(**json.loads(self._store.get(f"peer/{rank}/process"))) for rank in others}
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads. Call this after the process group is destroyed, so that the others do not wait in it."""
        if self._explanation is not None and self._store_in_rank_0 and self.rank == 0:
            self._wait_for_readers()
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=2 * SETTLED_S)

    def _wait_for_readers(self) -> None:
        """Wait until the others have read why this process ends: the store is lost together with this process."""
        deadline = time.monotonic() + GRACE_S + 2 * SETTLED_S
        while time.monotonic() < deadline:
            with suppress(RuntimeError):
                ends = self._ends(self._store)
                if all(rank in ends or process.is_gone() for rank, process in self._visible()):
                    return
            time.sleep(0.05)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Encloses a collective, so that a long wait in it is reported. (FSDP's own collectives are not enclosed.)"""
        self._collectives += 1
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = 0.0

    # -- why a collective failed --------------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> BaseException:
        """The error to raise in place of `error`: a LostRankError if a rank is lost, else the same error."""
        if error is self._explanation:  # explained already, at an inner level of the run
            return error
        self._failing.set()
        while self._explanation is None:
            with suppress(InterruptedBySignal):  # a launcher signals all processes when one has died; still explain it
                found = self._explained(error)
                self._publish_end(found)
                self._explanation = found
        return self._explanation

    def _explained(self, error: BaseException) -> BaseException:
        is_clear = isinstance(error, GracetuneError)
        if self._is_store_gone(within_s=0.0 if is_clear else SETTLED_S / 10):
            return error if is_clear else self._store_gone()
        try:
            self._failure_number = self._store.add("peer/failures", 1)
            return error if is_clear else self._found_among_peers(error)
        except RuntimeError:  # the store itself cannot be reached
            return error if is_clear else self._store_gone()

    def _found_among_peers(self, error: BaseException) -> BaseException:
        """Find the lost rank. The first rank that failed looks for the cause; the others repeat its result."""
        by_signal = isinstance(error, KeyboardInterrupt)
        beats = self._beats(self._store)
        patience = SETTLED_S / 4 if by_signal else SETTLED_S if self._failure_number == 1 else 2 * SETTLED_S
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            gone = [rank for rank, process in self._visible() if process.is_gone()]
            ends = self._ends(self._store)  # read after `is_gone`: a process writes its end before it exits
            if died := {rank: self._died_text(rank) for rank in gone if rank not in ends}:
                return self._error(died)
            if clear := {rank: end for rank, end in ends.items() if end.is_clear or self._failure_number > 1}:
                return self._repeated(clear, ended=ends)
            time.sleep(0.05)
        if by_signal:
            return error
        ends, now = self._ends(self._store), self._beats(self._store)
        silent = [rank for rank in beats if rank not in ends and now[rank] == beats[rank]]
        return self._error({rank: self._silent_text(rank) for rank in silent}) if silent else error

    def _repeated(self, ends: Mapping[int, _End], *, ended: Collection[int]) -> BaseException:
        """Repeat what other ranks found. The `ended` ranks left reasons of their own."""
        alive = {rank for rank, process in self._visible() if not process.is_gone()}
        for end in ends.values():
            unexplained = [rank for rank in end.lost if rank != self.rank and rank not in ended]
            if unexplained:
                return self._error(
                    {rank: self._silent_text(rank) if rank in alive else self._died_text(rank) for rank in unexplained}
                )
        rank, end = min(ends.items(), key=lambda item: item[1].number)
        if end.interrupted:
            return InterruptedBySignal(f"{end.reason} (rank {rank})")
        # That rank has reported its reason itself. Rank 0 repeats it in the run's log.
        return self._error({rank: f"it stopped: {end.reason}"}, reports=self.rank == 0)

    def _is_store_gone(self, within_s: float = 0.0) -> bool:
        """Whether the store's process ended. Checked before each use, because torch logs pages about a dead store."""
        if not self._store_in_rank_0 or self.rank == 0 or 0 not in dict(self._visible()):
            return False
        deadline = time.monotonic() + within_s
        while not (gone := self._processes[0].is_gone()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return gone

    def _store_gone(self) -> LostRankError:
        gone = {rank: self._died_text(rank) for rank, process in self._visible() if process.is_gone()}
        if not gone and self._store_in_rank_0:
            gone = {0: self._silent_text(0)}
        return self._error(gone) if gone else self._error({}, "the launcher of this run has ended, or its machine")

    def _visible(self) -> list[tuple[int, _Process]]:
        """The other ranks on this machine, whose processes can be looked up."""
        own_machine = self._this.machine
        return [(rank, process) for rank, process in self._processes.items() if process.machine == own_machine]

    def _died_text(self, rank: int) -> str:
        why = "killed, or crashed; its own messages and `dmesg -T` (out of memory?) may say more"
        return f"its process ({self._processes[rank]}) has ended without a message: {why}"

    def _silent_text(self, rank: int) -> str:
        return f"its process ({self._processes[rank]}) does not answer: it is stopped, or its machine is out of reach"

    def _error(self, lost: Mapping[int, str], headline: str = "", *, reports: bool | None = None) -> LostRankError:
        left = [rank for rank in range(self.world_size) if rank not in lost]
        lines = [f"rank {rank} of {self.world_size} is lost: {why}" for rank, why in sorted(lost.items())] or [headline]
        if reports is None:
            reports = not left or self.rank == min(left)
        text = "\n".join([*lines, self.advice()]).strip() if reports else lines[0].partition("\n")[0]
        return LostRankError(text, sorted(lost), reports=reports)

    # -- the store ----------------------------------------------------------------------------------------------------

    def _publish_end(self, error: BaseException) -> None:
        if self._is_store_gone():
            return
        lost = error.lost if isinstance(error, LostRankError) else ()
        by_signal = isinstance(error, KeyboardInterrupt)
        is_clear = by_signal or isinstance(error, GracetuneError)
        end = _End(self._failure_number, str(error) or type(error).__name__, by_signal, lost, is_clear)
        with suppress(RuntimeError):
            self._store.set(f"peer/{self.rank}/end", json.dumps(asdict(end)))

    def _ends(self, store: Any) -> dict[int, _End]:
        ended = [rank for rank in self._processes if store.check([f"peer/{rank}/end"])]
        found = {rank: json.loads(store.get(f"peer/{rank}/end")) for rank in ended}
        return {rank: _End(**{**end, "lost": tuple(end["lost"])}) for rank, end in found.items()}

    def _beats(self, store: Any) -> dict[int, tuple[int, int]]:
        """By other rank: its beat, and the number of collectives it has begun."""
        ranks = [*self._processes]
        found = store.multi_get([f"peer/{rank}/beat" for rank in ranks])
        return {rank: _numbers(text) for rank, text in zip(ranks, found, strict=True)}

    # -- the threads --------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Thread 1: exchange heartbeats with the store, which may hang. Thread 2 only reads what this one saw."""
        while not self._closing.wait(BEAT_S * max(1, self.world_size // 64)):
            try:
                if self._is_store_gone():
                    break
                seen = self._seen
                self._threads_store.set(f"peer/{self.rank}/beat", f"{seen.beat + 1} {self._collectives}")
                now = self._beats(self._threads_store)
                missed = {
                    rank: seen.missed.get(rank, 0) + 1 if now[rank][0] == seen.beat_of(rank) else 0 for rank in now
                }
                self._seen = _Seen(seen.beat + 1, now, missed, self._ends(self._threads_store))
            except RuntimeError:
                break
        self._has_store.clear()

    def _watch(self) -> None:
        """Thread 2: report long waits, and end the process if a peer is lost and the main thread does not notice it.

        The main thread has GRACE_S for that, whatever it does.
        """
        last_report, beat, unanswered, lost_since = 0.0, 0, 0, 0.0
        while not self._closing.wait(BEAT_S * max(1, self.world_size // 64)):
            seen = self._seen
            beat, unanswered = seen.beat, unanswered + 1 if seen.beat == beat else 0
            last_report = self._report_waiting(last_report, seen)
            is_store_lost = not self._has_store.is_set() or unanswered >= SILENT_BEATS
            dead = any(process.is_gone() for _, process in self._visible())
            lost = is_store_lost or dead or seen.ends or max(seen.missed.values(), default=0) >= SILENT_BEATS
            lost_since = (lost_since or time.monotonic()) if lost else 0.0
            if lost and time.monotonic() - lost_since > GRACE_S and not self._failing.is_set():
                self._end_process(self._store_gone() if is_store_lost else self._lost_by(seen))

    def _lost_by(self, seen: _Seen) -> BaseException:
        dead = {rank: self._died_text(rank) for rank, process in self._visible() if process.is_gone()}
        silent = {rank: self._silent_text(rank) for rank, count in seen.missed.items() if count >= SILENT_BEATS}
        return self._repeated(seen.ends, ended=seen.ends) if seen.ends else self._error(dead or silent)

    def _report_waiting(self, last_report: float, seen: _Seen) -> float:
        """Report a long wait. Returns how long the wait was when it was last reported."""
        since, met = self._since, self._collectives
        waited = time.monotonic() - since if since else 0.0
        behind = [rank for rank, (_, theirs) in seen.beats.items() if theirs < met]
        if waited < REPORT_EVERY_S[self.rank == 0] or not behind:
            return 0.0
        if waited < 2 * last_report:
            return last_report
        which = "which is alive" if max(seen.missed[rank] for rank in behind) < 10 else "which does not answer"
        ranks = ", ".join(map(str, behind))
        sys.stderr.write(f"rank {self.rank} has waited {format_duration(waited)} for rank {ranks}, {which}\n")
        return waited

    def _end_process(self, error: BaseException) -> None:
        """End the process. The main thread is usually in a collective that does not return, where no exception reaches
        it."""
        self._closing.set()
        by_signal = isinstance(error, KeyboardInterrupt)
        if isinstance(error, LostRankError):
            self.on_forced_end(error)
        sys.stderr.write(f"interrupted by {error}\n" if by_signal else f"error {error}\n")
        sys.stderr.flush()
        os._exit(3 if by_signal else 1)


@dataclass(frozen=True)
class _Seen:
    """The last values read from the store."""

    beat: int = 0
    """This rank's own beat."""
    beats: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By other rank: its beat, and the number of collectives it has begun."""
    missed: Mapping[int, int] = field(default_factory=dict)
    """By other rank: how many of our own beats have passed since its last one."""
    ends: Mapping[int, _End] = field(default_factory=dict)

    def beat_of(self, rank: int) -> int:
        return self.beats.get(rank, (0, 0))[0]


def _numbers(text: bytes) -> tuple[int, int]:
    beat, met = text.split()
    return int(beat), int(met)
