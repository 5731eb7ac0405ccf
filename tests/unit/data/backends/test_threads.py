"""Backends are read by many threads at once."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gracetune.data.backend import Backend
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.url import UrlBackend
from unit.data.backends.helpers import fill, put, staged

FILES = {f"{number}.png": os.urandom(20_000 + number) for number in range(5)}


def packed(folder: Path) -> Backend:
    return staged(folder, compression="lz4")


def url_backend(folder: Path) -> Backend:
    url = f"memory://{uuid.uuid4()}"
    for path, data in FILES.items():
        put(url, path, data)
    return UrlBackend(url)


@pytest.mark.parametrize("make", [LocalBackend, packed, url_backend], ids=["local", "in_memory", "url"])
def test_every_reader_sees_whole_files(tmp_path: Path, make: Callable[[Path], Backend]) -> None:
    backend = make(fill(tmp_path, FILES))

    def read(path: str) -> bool:
        return backend.read(path) == FILES[path]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, [*FILES] * 40))
    backend.close()  # type: ignore[attr-defined]
