from __future__ import annotations

import time
from pathlib import Path

import pytest

from gracetune.data.backends.local import LocalBackend
from gracetune.data.errors import MissingFileError
from gracetune.testing.slow_backend import SlowBackend


@pytest.fixture
def slow(tmp_path: Path) -> SlowBackend:
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    return SlowBackend(LocalBackend(tmp_path))


def test_says_what_the_backend_behind_it_says(slow: SlowBackend) -> None:
    assert slow.list() == ("a.txt",)
    assert slow.read("a.txt") == b"x" * 1000
    with slow.open("a.txt") as stream:
        assert stream.read(3) == b"xxx"
    assert (slow.stat("a.txt").size, slow.exists("a.txt")) == (1000, True)
    assert list(slow.survey().files) == ["a.txt"]
    with pytest.raises(MissingFileError):
        slow.read("b.txt")


def test_counts_every_request(slow: SlowBackend) -> None:
    slow.list()
    slow.read("a.txt")
    slow.exists("a.txt")
    assert slow.requests == 3


def test_latency_and_bandwidth_take_their_time(slow: SlowBackend) -> None:
    started = time.perf_counter()
    slow.read("a.txt")
    assert time.perf_counter() - started < 0.1
    slow.latency_seconds, slow.bytes_per_second = 0.05, 10_000
    started = time.perf_counter()
    slow.read("a.txt")
    assert time.perf_counter() - started >= 0.15
