from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.hardware.machines import FakeCuda


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler to build the fake libcuda")
    library = tmp_path_factory.mktemp("fake") / "libfakecuda.so"
    source = Path(__file__).with_name("fake_libcuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return FakeCuda(str(library), ctypes.CDLL(str(library)))


@pytest.fixture
def fake_cuda(fake_library: FakeCuda) -> Iterator[FakeCuda]:
    fake_library.fail("nothing", 0)
    yield fake_library
    assert fake_library.open_contexts == 0, "a context was left open"
