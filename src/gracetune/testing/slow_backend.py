"""A dataset backend with latency and limited bandwidth."""

from __future__ import annotations

import io
import threading
import time
from typing import BinaryIO

from gracetune.data.backend import Backend, FileStat, Listing, survey


class SlowBackend:
    """Wraps a backend, with `latency_seconds` before every response and `bytes_per_second` for content.

    Both can be changed while it is used. Each caller waits for its own bytes only, as with a server that has enough
    bandwidth for all. `requests` counts the calls: it shows whether a source is used at all.
    """

    def __init__(self, inner: Backend, *, latency_seconds: float = 0.0, bytes_per_second: float | None = None) -> None:
        self._inner = inner
        self.latency_seconds, self.bytes_per_second = latency_seconds, bytes_per_second
        self.requests = 0
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        return self._inner.root

    def list(self) -> tuple[str, ...]:
        self._wait(0)
        return tuple(self._inner.list())

    def survey(self) -> Listing:
        self._wait(0)
        return survey(self._inner)

    def stat(self, path: str) -> FileStat:
        self._wait(0)
        return self._inner.stat(path)

    def exists(self, path: str) -> bool:
        self._wait(0)
        return self._inner.exists(path)

    def read(self, path: str) -> memoryview:
        data = self._inner.read(path)
        self._wait(len(data))
        return data

    def open(self, path: str) -> BinaryIO:
        return io.BytesIO(self.read(path))

    def _wait(self, size: int) -> None:
        with self._lock:
            self.requests += 1
        time.sleep(self.latency_seconds + (size / self.bytes_per_second if self.bytes_per_second else 0.0))
