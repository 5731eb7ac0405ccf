"""Temporary folders, the memory this process holds, and child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import fsspec  # type: ignore[import-untyped]

from gracetune.data.backend import Backend
from gracetune.data.backends.in_memory import InMemoryBackend
from gracetune.data.backends.local import LocalBackend
from gracetune.data.staging.copying import StagingOptions
from gracetune.data.staging.file_selection import MEDIA, select
from gracetune.data.staging.stager import Stager
from gracetune.hardware import Machine, probe

MIB = 1 << 20


@cache
def this_machine() -> Machine:
    return probe()


def fill(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return folder


def put(url: str, path: str, data: bytes) -> None:
    """Write to the storage behind a URL directly, because the backend is read-only."""
    store, base = fsspec.core.url_to_fs(url)
    store.pipe_file(f"{base.rstrip('/')}/{path}", data)


def stager(source: Backend | Path, *, limit: int | None = None, **options: Any) -> Stager:
    backend = LocalBackend(source) if isinstance(source, Path) else source
    settings = StagingOptions(**{"dataset": "pets", "threads": 3, **options})
    return Stager(backend, select(MEDIA), settings, this_machine(), limit)


def staged(source: Backend | Path, **options: Any) -> InMemoryBackend:
    return stager(source, **options).open()


def contents(backend: Backend) -> dict[str, bytes]:
    return {path: bytes(backend.read(path)) for path in backend.list()}


def held() -> tuple[int, int]:
    """Descriptors and mappings of staged memory in this process."""
    descriptors = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - iterdir would hold one more itself
        with suppress(OSError):
            descriptors += "gracetune-staged" in os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    mappings = Path("/proc/self/maps").read_text().count("gracetune-staged")
    return descriptors, mappings


class Child:
    """A Python process that runs `code`, communicates line by line, and ends with its test."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, line: str) -> None:
        self._input.write(line + "\n")
        self._input.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    @property
    def _input(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()
