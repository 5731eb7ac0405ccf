"""Tests on a real GPU: `pytest -m gpu`. At most 4 GiB of managed memory, and never real oversubscription."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracetune.memory.managed import ManagedHeap
from gracetune.memory.native import Unavailable, Uvm, load
from gracetune.memory.native.binding import LIBRARY
from gracetune.units import GIB

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def empty_gpu() -> None:
    """What earlier tests left behind is not this one's: garbage in cycles, cuBLAS' workspaces, cached blocks."""
    import torch

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def uvm() -> Uvm:
    if not LIBRARY.is_file():  # a bare checkout, as on a machine that runs from an offline bundle
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=True)
    loaded = load()
    assert not isinstance(loaded, Unavailable), loaded
    loaded.set_managed_cap(4 * GIB)
    return loaded


@pytest.fixture
def heap(uvm: Uvm) -> Iterator[ManagedHeap]:
    import torch

    before = uvm.total_stats().live_bytes
    heap = ManagedHeap(uvm, 0, lambda: torch.cuda.synchronize(0))
    yield heap
    assert heap.held_bytes == 0, "the test left a managed buffer behind"
    assert uvm.total_stats().live_bytes == before
