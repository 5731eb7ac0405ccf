"""Every backend behaves like a dict of bytes, and no path leads out of its root."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gracetune.data.backends.in_memory import InMemoryBackend
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.open import attach_backend
from gracetune.data.backends.url import UrlBackend
from gracetune.data.errors import DataError, MissingFileError
from unit.data.backends.helpers import contents, fill, held, put, staged

PATHS = ("a.txt", "a.png", "A.TXT", "b/c.jpg", "b/ü 日.png", "x/y/z.txt", "x/y-z.txt", "x/y.json")
paths = st.sampled_from(PATHS)
data = st.one_of(st.binary(max_size=40), st.integers(0, 3).map(lambda count: b"long " * (count * 3000)))


def local(folder: Path, files: dict[str, bytes]) -> Any:
    return LocalBackend(fill(folder, files))


def in_memory(folder: Path, files: dict[str, bytes]) -> Any:
    return staged(fill(folder, files), compression="lz4", threads=2)


def url(folder: Path, files: dict[str, bytes]) -> Any:
    address = f"memory://{uuid.uuid4()}/data"
    for path, content in files.items():
        put(address, path, content)
    return UrlBackend(address)


def staged_url(folder: Path, files: dict[str, bytes]) -> Any:
    return staged(url(folder, files), threads=1)


@pytest.mark.parametrize("make", [local, in_memory, url, staged_url])
@settings(max_examples=25, deadline=None)
@given(files=st.dictionaries(paths, data, max_size=6))
def test_a_backend_shows_exactly_the_files(make: Callable[..., Any], files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder, make(Path(folder), files) as backend:
        assert backend.list() == tuple(sorted(files))
        for path in PATHS:
            _look(backend, path, files.get(path))
        if isinstance(backend, InMemoryBackend):
            with attach_backend(backend.handle()) as other:
                assert contents(other) == files
    assert held() == (0, 0)


def _look(backend: Any, path: str, expected: bytes | None) -> None:
    assert backend.exists(path) == (expected is not None)
    if expected is None:
        for call in (backend.read, backend.stat, backend.open):
            with pytest.raises(MissingFileError):
                call(path)
        return
    assert backend.read(path) == expected
    assert backend.stat(path).size == len(expected)
    with backend.open(path) as stream:
        middle = len(expected) // 2
        assert (stream.seek(middle), stream.read(), stream.seek(0), stream.read()) == (
            middle, expected[middle:], 0, expected,
        )  # fmt: skip


SECRET = b"outside"
names = st.sampled_from(["a", "secret.txt", "passwd", "out.txt", "circle", "~", "%2e%2e", "\udcff", "...", " ", "\n"])
turns = st.sampled_from(["..", "..", "deep", "deep", "in", "out", "root", "root2", "etc", ".", "", "C:"])
ways = st.tuples(st.lists(turns, max_size=4), names).map(lambda way: [*way[0], way[1]])
fuzzed = st.one_of(
    ways.map("/".join),
    ways.map("\\".join),
    ways.map(lambda way: "/" + "/".join(way)),
    st.text(alphabet="./\\\0adeptu", max_size=12),
    st.text(max_size=12),
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("fuzz")
    fill(
        base,
        {"root/a": b"A", "root/deep/deep/a": b"A", "secret.txt": SECRET, "etc/passwd": SECRET, "root2/a": SECRET},
    )
    root = base / "root"
    (root / "out").symlink_to("..")
    (root / "out.txt").symlink_to("../secret.txt")
    (root / "deep/in").symlink_to("..")
    (root / "deep/out").symlink_to("../out")
    (root / "circle").symlink_to("circle")
    return root


class TestNoWayOut:
    @settings(max_examples=150, deadline=None)
    @given(path=fuzzed)
    @example("../secret.txt")
    @example("deep/../../secret.txt")
    @example("deep/in/out/secret.txt")
    @example("deep/out/secret.txt")
    @example("../root2/a")
    @example("out.txt")
    def test_no_path_leads_out_of_the_root(self, tree: Path, path: str) -> None:
        backends: list[Any] = [LocalBackend(tree), staged(tree, threads=1)]
        for backend in backends:
            for call in (backend.read, backend.stat, backend.exists, backend.open):
                try:
                    found = call(path)
                except DataError:
                    continue
                if isinstance(found, memoryview):
                    assert found != SECRET
                elif hasattr(found, "read"):
                    with found:
                        assert found.read() != SECRET
            backend.close()
