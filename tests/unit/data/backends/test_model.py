"""Every backend behaves like a dict of bytes, and no string whatever leads out of its root."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gracetune.data.backend import Backend
from gracetune.data.backends.in_memory import InMemoryBackend
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.open import attach_backend
from gracetune.data.backends.url import UrlBackend
from gracetune.data.errors import DataError, MissingFileError
from unit.data.backends.helpers import fill, held, staged

PATHS = ("a.txt", "a.png", "A.TXT", "b/c.jpg", "b/ü 日.png", "x/y/z.txt", "x/y-z.txt", "x/y.json")
paths = st.sampled_from(PATHS)
data = st.one_of(st.binary(max_size=40), st.integers(0, 3).map(lambda count: b"long " * (count * 3000)))


class DictModel(RuleBasedStateMachine):
    """Rules are what callers do; the dict says what they must find."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, bytes] = {}
        self.folder = Path(tempfile.mkdtemp())
        self.backend: Any = None

    def make(self) -> Backend:
        raise NotImplementedError

    @initialize(files=st.dictionaries(paths, data, max_size=4))
    def begin(self, files: dict[str, bytes]) -> None:
        self.fill_source(files)
        self.model = dict(files)
        self.backend = self.make()

    def fill_source(self, files: dict[str, bytes]) -> None:
        fill(self.folder, files)

    @rule(path=paths, content=data)
    def write(self, path: str, content: bytes) -> None:
        self.backend.write(path, content)
        self.model[path] = content

    @rule(path=paths)
    def delete(self, path: str) -> None:
        if path in self.model:
            self.backend.delete(path)
            del self.model[path]
        else:
            with pytest.raises(MissingFileError):
                self.backend.delete(path)

    @rule(path=paths)
    def look(self, path: str) -> None:
        assert self.backend.exists(path) == (path in self.model)
        if path not in self.model:
            for call in (self.backend.read, self.backend.stat, self.backend.open):
                with pytest.raises(MissingFileError):
                    call(path)
            return
        expected = self.model[path]
        assert self.backend.read(path) == expected
        assert self.backend.stat(path).size == len(expected)
        with self.backend.open(path) as stream:
            middle = len(expected) // 2
            assert (stream.seek(middle), stream.read(), stream.seek(0), stream.read()) == (
                middle, expected[middle:], 0, expected,
            )  # fmt: skip

    @rule()
    def reopen(self) -> None:
        self.backend.close()
        self.backend = self.make()

    @precondition(lambda self: isinstance(self.backend, InMemoryBackend))
    @rule()
    def refresh(self) -> None:
        self.backend.refresh()

    @precondition(lambda self: isinstance(self.backend, InMemoryBackend))
    @rule()
    def attach(self) -> None:
        with attach_backend(self.backend.handle()) as other:
            assert {path: bytes(other.read(path)) for path in other.list()} == self.model

    @invariant()
    def lists_exactly_what_is_there(self) -> None:
        if self.backend is not None:
            assert self.backend.list() == tuple(sorted(self.model))

    def teardown(self) -> None:
        if self.backend is not None:
            self.backend.close()
        shutil.rmtree(self.folder)
        assert held() == (0, 0)


class LocalModel(DictModel):
    def make(self) -> Backend:
        return LocalBackend(self.folder)


class StagedModel(DictModel):
    def make(self) -> Backend:
        return staged(self.folder, compression="lz4", threads=2)


class MemoryUrlModel(DictModel):
    def __init__(self) -> None:
        super().__init__()
        self.url = f"memory://{uuid.uuid4()}/data"

    def fill_source(self, files: dict[str, bytes]) -> None:
        for path, content in files.items():
            UrlBackend(self.url).write(path, content)

    def make(self) -> Backend:
        return UrlBackend(self.url)


class StagedUrlModel(MemoryUrlModel):
    def make(self) -> Backend:
        return staged(UrlBackend(self.url), threads=1)


few = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestLocal = LocalModel.TestCase
TestLocal.settings = few
TestStaged = StagedModel.TestCase
TestStaged.settings = few
TestMemoryUrl = MemoryUrlModel.TestCase
TestMemoryUrl.settings = few
TestStagedUrl = StagedUrlModel.TestCase
TestStagedUrl.settings = few


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
    def test_nothing_outside_is_read_written_or_deleted(self, tree: Path, path: str) -> None:
        backends: list[Any] = [LocalBackend(tree), staged(tree, threads=1)]
        outside = _outside(tree)
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
            for change in (lambda: backend.write(path, b"new"), lambda: backend.delete(path)):  # noqa: B023
                try:
                    change()
                except DataError:
                    continue
            backend.close()
        assert _outside(tree) == outside


def _outside(tree: Path) -> dict[str, bytes]:
    base = tree.parent
    found = {}
    for where, folders, names in os.walk(base):
        if where == str(base):
            folders.remove("root")
        found.update({f"{where}/{name}": Path(where, name).read_bytes() for name in names})
    return found
