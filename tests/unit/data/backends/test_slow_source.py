"""A run on staged data does not depend on the speed of its source."""

from __future__ import annotations

import time
from pathlib import Path

from gracetune.data.backends.local import LocalBackend
from gracetune.data.index import DataIndex
from gracetune.data.loader import Exhausted, Loader
from gracetune.data.refs import BatchRef
from gracetune.testing.slow_backend import SlowBackend
from unit.data.backends.helpers import staged
from unit.data.folders import images, index_of, write


def epoch(index: DataIndex) -> tuple[int, float]:
    """Samples, and seconds."""
    started, samples = time.perf_counter(), 0
    loader = Loader(index, batch_size=4, epochs=1)
    while not isinstance(outcome := loader.next_batch(), Exhausted):
        samples += len([index.load(ref) for ref in outcome.samples]) if isinstance(outcome, BatchRef) else 0
    return samples, time.perf_counter() - started


def test_batches_come_as_fast_when_the_source_has_become_slow(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", images(24))
    source = SlowBackend(LocalBackend(folder))
    with staged(source) as backend:
        index = index_of(tmp_path, {"path": str(folder), "type": "in_memory"}, open_backend=lambda dataset: backend)
        requested = source.requests
        quick = epoch(index)
        source.latency_seconds = 1.0
        slow = epoch(index)
        assert quick[0] == slow[0] == 24
        assert slow[1] < quick[1] + 0.9  # less than what a single request would take
        assert source.requests == requested


def test_the_same_epoch_straight_from_the_slow_source_is_slow(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", images(8))
    source = SlowBackend(LocalBackend(folder))
    index = index_of(tmp_path, {"path": str(folder)}, open_backend=lambda dataset: source)
    source.latency_seconds = 0.2
    assert epoch(index)[1] > 0.4
