"""Live updates: one poller for each run that is shown, shared by all pages that show it, asleep otherwise.

A poller compares the size of the log twice a second, which costs next to nothing, and reads only what was added. Each
browser gets the messages through a bounded queue; one that does not keep up gets a message to fetch everything again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio.to_thread

from gracetune.studio.log_lines import Fields, open_log, parse_line
from gracetune.studio.replies import StudioError, json_bytes
from gracetune.studio.run_list import RunEntry, RunList

PING_S = 15.0
_MOST_STREAMS = 128
_MOST_WAITING = 256
"""Messages that wait for one browser."""
_MOST_BYTES = 4 << 20
"""Bytes that are followed at once; after more, the pages fetch everything again."""
Message = tuple[str, Any]
"""The name of a server-sent event and its data."""


class Feed:
    """The messages of one poller, for any number of listeners."""

    def __init__(self, poll: Callable[[], list[Message]], seconds: float) -> None:
        """Set the function that reads new messages and the shortest pause between two calls of it.

        `poll` may block; it runs in a thread, never twice at a time.
        """
        self._poll, self._seconds = poll, seconds
        self._listeners: set[asyncio.Queue[Message | None]] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def listen(self) -> asyncio.Queue[Message | None]:
        queue: asyncio.Queue[Message | None] = asyncio.Queue(_MOST_WAITING)
        self._listeners.add(queue)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return queue

    def leave(self, queue: asyncio.Queue[Message | None]) -> None:
        self._listeners.discard(queue)
        if not self._listeners and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        for queue in self._listeners:
            _empty(queue)
            queue.put_nowait(None)

    async def _run(self) -> None:
        while True:
            began, spent = time.monotonic(), 0.0
            try:
                messages, spent = await anyio.to_thread.run_sync(self._timed_poll)
            except OSError:  # of a file server or a failing disk: tried again, with the same beginning
                messages = []
            for message in messages:
                for queue in self._listeners:
                    if queue.full():
                        _empty(queue)
                        queue.put_nowait(("reset", {}))
                    else:
                        queue.put_nowait(message)
            # Polling takes at most a fiftieth of a core, and half of the time of a slow file server. On a machine that
            # is busy with training a poll takes long by the clock, which is no reason to wait longer for the next one.
            await asyncio.sleep(max(self._seconds, 50 * spent, time.monotonic() - began))

    def _timed_poll(self) -> tuple[list[Message], float]:
        """The messages, and the processor time that they took."""
        began = time.thread_time()
        return self._poll(), time.thread_time() - began


def _empty(queue: asyncio.Queue[Message | None]) -> None:
    while not queue.empty():
        queue.get_nowait()


class Feeds:
    """The feeds of a studio."""

    def __init__(self, runs: RunList) -> None:
        self._runs = runs
        self._list: Feed | None = None
        self._of_runs: dict[str, Feed] = {}

    def of_list(self) -> Feed:
        if self._list is None:
            self._list = Feed(_ListPoll(self._runs), 2.0)
        return self._list

    def of_run(self, run: RunEntry) -> Feed:
        self._of_runs = {name: feed for name, feed in self._of_runs.items() if feed.listeners}
        if run.id not in self._of_runs:
            self._of_runs[run.id] = Feed(_RunPoll(self._runs, run), 0.5)
        return self._of_runs[run.id]

    def close(self) -> None:
        """End all streams."""
        for feed in [*self._of_runs.values(), *([] if self._list is None else [self._list])]:
            feed.close()

    def check_room(self) -> None:
        """Raise StudioError if too many streams are open."""
        streams = sum(feed.listeners for feed in self._of_runs.values())
        if streams + (0 if self._list is None else self._list.listeners) >= _MOST_STREAMS:
            hint = "close some pages of the studio"
            raise StudioError(429, f"{_MOST_STREAMS} open streams", "fewer open pages", hint)


async def stream(feed: Feed, first: list[Message]) -> AsyncIterator[bytes]:
    """The bytes of a stream of server-sent events."""
    queue = feed.listen()
    try:
        yield b"retry: 2000\n\n"
        for message in first:
            yield _sent(message)
        while True:
            try:
                next_one = await asyncio.wait_for(queue.get(), PING_S)
            except TimeoutError:
                next_one = ("ping", {})
            if next_one is None:
                return
            yield _sent(next_one)
    finally:
        feed.leave(queue)


def _sent(message: Message) -> bytes:
    name, data = message
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json_bytes(data))


# -- what is polled ---------------------------------------------------------------------------------------------------


class _ListPoll:
    """The rows that changed since the last call."""

    def __init__(self, runs: RunList) -> None:
        self._runs = runs
        self._known: dict[str, dict[str, Any]] = {}

    def __call__(self) -> list[Message]:
        rows = {row["id"]: row for row in self._runs.rows()}
        changed = [row for name, row in rows.items() if self._known.get(name) != row]
        removed = [name for name in self._known if name not in rows]
        self._known = rows
        return [("runs", {"changed": changed, "removed": removed})] if changed or removed else []


class _RunPoll:
    """New events of a run, and its row when it changed."""

    def __init__(self, runs: RunList, run: RunEntry) -> None:
        self._runs, self._run = runs, run
        self._row: dict[str, Any] | None = None
        self._end, self._inode = -1, 0

    def __call__(self) -> list[Message]:
        if self._end < 0:
            self._end, self._inode = self._stat()
        messages = self._new_events()
        row = self._runs.row(self._run)
        if row != self._row:
            messages.append(("status", row))
            self._row = row
        return messages

    def _stat(self) -> tuple[int, int]:
        try:
            descriptor = open_log(self._run.path)
        except OSError:
            return 0, 0
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        return found.st_size, found.st_ino

    def _new_events(self) -> list[Message]:
        size, inode = self._stat()
        if (size, inode) == (self._end, self._inode):
            return []
        if size < self._end or (inode != self._inode and self._inode) or size - self._end > _MOST_BYTES:
            self._end, self._inode = size, inode
            return [("reset", {})]
        try:
            descriptor = open_log(self._run.path)
        except OSError:
            return []
        try:
            data = os.pread(descriptor, size - self._end, self._end)
        finally:
            os.close(descriptor)
        complete = data.rfind(b"\n") + 1
        self._end, self._inode = self._end + complete, inode
        events = [event for line in data[:complete].split(b"\n") if (event := parse_line(line)) is not None]
        if len(events) > _MOST_WAITING // 2 or any(one["kind"] == "RunStarted" for one in events):
            return [("reset", {})]
        return [_message(one) for one in events]


def _message(event: Fields) -> Message:
    if event["kind"] != "StepDone":
        return "event", {name: value for name, value in event.items() if name != "v"}
    names = ("step", "epoch", "loss", "lr", "grad_norm", "step_ms", "data_wait_ms", "samples")
    fields = {name: _plain(event.get(name)) for name in names}
    return "step", {**fields, "expert": event.get("stage", ""), "time_s": event.get("time_s")}


def _plain(value: Any) -> Any:
    """Non-finite numbers are strings in the log."""
    return None if isinstance(value, str) else value
