"""Backends are used by many threads at once: whoever reads sees a whole file, the old one or the new one."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gracetune.data.backend import Backend
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.url import UrlBackend
from unit.data.backends.helpers import fill, staged

VERSIONS = [bytes([number]) * (200_000 + number) for number in range(5)]


def url_backend(folder: Path) -> Backend:
    backend = UrlBackend(f"memory://{uuid.uuid4()}")
    backend.write("a.png", VERSIONS[0])
    return backend


@pytest.mark.parametrize("make", [LocalBackend, staged, url_backend], ids=["local", "in_memory", "url"])
def test_no_reader_sees_half_a_file(tmp_path: Path, make: Callable[[Path], Backend]) -> None:
    backend = make(fill(tmp_path, {"a.png": VERSIONS[0]}))
    done = threading.Event()

    def write() -> None:
        for number in range(40):
            backend.write("a.png", VERSIONS[number % 5])
        done.set()

    def read() -> int:
        count = 0
        while not done.is_set() or not count:
            view = backend.read("a.png")
            assert view == VERSIONS[view[0]]
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        pool.submit(write).result()
        assert all(reader.result() for reader in readers)
    assert backend.read("a.png") == VERSIONS[39 % 5]
    backend.close()  # type: ignore[attr-defined]


def test_many_writers_into_new_folders(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    paths = [f"deep/{number % 3}/er/{number}.txt" for number in range(60)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: backend.write(path, path.encode()), paths))
    assert {path: bytes(backend.read(path)) for path in backend.list()} == {path: path.encode() for path in paths}


def test_refreshing_under_readers(tmp_path: Path) -> None:
    fill(tmp_path, {"a.png": VERSIONS[0], "b.png": VERSIONS[1]})
    with staged(tmp_path, compression="lz4") as backend:
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                for path in ("a.png", "b.png"):
                    view = backend.read(path)
                    assert view == VERSIONS[view[0]]

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read) for _ in range(3)]
            for number in range(2, 12):
                (tmp_path / "new").write_bytes(VERSIONS[number % 5])
                (tmp_path / "new").rename(tmp_path / "a.png")
                assert backend.refresh().changed == ("a.png",)
                assert backend.read("a.png") == VERSIONS[number % 5]
            done.set()
            for reader in readers:
                reader.result()
