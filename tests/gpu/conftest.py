"""Tests on a real GPU: `make test-gpu`. At most 4 GiB of managed memory, and never real oversubscription.

All run in one process, in a random order: `--order-seed N` repeats one. Every test has to leave the process as it found
it (`isolation`): the one that does not is the one that fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu.results import GpuTestResults, Recorder, file_for, in_random_order, this_machine
from gracetune.config.environment import make_cublas_deterministic
from gracetune.memory.managed import ManagedHeap
from gracetune.memory.native import Unavailable, Uvm, load
from gracetune.memory.native.binding import LIBRARY
from gracetune.units import GIB

ROOT = Path(__file__).parents[2]
FAILED = pytest.StashKey[bool]()
SEED = pytest.StashKey[int]()
EXIT = pytest.StashKey[int]()
COLLECTED = pytest.StashKey[tuple[str, ...]]()

make_cublas_deterministic()  # read when CUDA starts; the same for every selection of tests


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu tests")
    group.addoption("--order-seed", type=int, metavar="N", help="of the GPU tests' random order; unset: by the clock")
    group.addoption("--gpu-results", type=Path, metavar="FOLDER", help="merge into FOLDER/gpu-tests-GPU.json")


def _seed(config: pytest.Config) -> int:
    if SEED not in config.stash:
        requested: int | None = config.getoption("order_seed", None)
        config.stash[SEED] = int(time.time()) % 1_000_000 if requested is None else requested
    return config.stash[SEED]


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Not in the header: that is left out by -q, and written before this file is found by a run of all tests."""
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    return [f"{len(ours)} GPU tests in a random order: --order-seed {_seed(config)}"] if ours else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def is_ours(item: pytest.Item) -> bool:
        return Path(__file__).parent in item.path.parents

    items[:] = in_random_order(items, is_ours, _seed(config))
    ours = [item for item in items if is_ours(item)]
    config.stash[COLLECTED] = tuple(item.nodeid for item in ours)
    for item in ours:
        item.add_marker(pytest.mark.gpu)


def pytest_collection_finish(session: pytest.Session) -> None:
    """After the selection by marks: results are kept where a GPU is there to have any."""
    config = session.config
    folder: Path | None = config.getoption("gpu_results", None)
    if folder is None or config.getoption("collectonly"):
        return
    import torch

    if not torch.cuda.is_available():
        return
    circumstances = this_machine()
    file = file_for(folder, circumstances.gpu)
    collected = config.stash[COLLECTED]
    results = GpuTestResults.begin(file, circumstances, _seed(config), selected=len(session.items), existing=collected)
    config.pluginmanager.register(Recorder(results))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report: pytest.TestReport = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[EXIT] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends at once where CUDA was used: torch 2.11 has waited five minutes at exit for a compile worker."""
    torch = sys.modules.get("torch")
    if torch is None or EXIT not in config.stash or not torch.cuda.is_initialized():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.stash[EXIT])


@pytest.fixture(autouse=True)
def isolated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing of another test is here, and nothing of this one stays. The first fixture to begin, the last to end."""
    from gpu import isolation

    isolation.drop_caches()
    isolation.seed_everything()
    before = isolation.State.now()
    yield
    item = request.node
    found = before.restore()
    if (why := isolation.why_unusable()) is not None:
        request.session.shouldfail = f"CUDA cannot be used any more after {item.nodeid}: {why}"
        pytest.fail(f"CUDA cannot be used any more: {why}")
    isolation.drop_caches()
    if item.stash.get(FAILED, False):
        return  # its frames are in pytest's hands, with everything they hold
    item.funcargs.clear()  # fixtures are torn down, and their values would count as left behind
    found += before.left_behind()
    if found:
        pytest.fail(f"{item.name} did not leave the process as it found it: {'; '.join(found)}")


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
    assert uvm.total_stats().live_bytes <= before, "less where an earlier test that failed had left some"
