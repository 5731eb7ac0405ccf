"""Our Triton kernels without a GPU: each compiles for Hopper, and computes what plain torch does."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("kernel_cases.py")
TRITON = "triton==3.7.1"
"""The one that torch of `constraints.txt` needs in its builds for GPUs."""


@pytest.fixture(scope="module")
def path_with_triton(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH for a process with Triton, which builds of torch for the CPU do not bring."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")])]
    if importlib.util.find_spec("triton") is None:
        folder = tmp_path_factory.mktemp("triton")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--no-input"]
        done = subprocess.run(
            [*command, "--disable-pip-version-check", "--target", folder, TRITON],
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            pytest.skip(f"{TRITON} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        paths.append(str(folder))
    return os.pathsep.join(paths)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("interpreted", "expected"),
    [("0", r"\d+ forms of \d+ kernels compile"), ("1", r"\d+ cases agree")], ids=["compiled", "interpreted"],
)  # fmt: skip
def test_every_kernel(interpreted: str, expected: str, path_with_triton: str, tmp_path: Path) -> None:
    """In a process of its own, because Triton chooses between its compiler and its interpreter when it is imported."""
    environment = {
        **os.environ, "PYTHONPATH": path_with_triton, "TRITON_INTERPRET": interpreted,
        "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, CASES], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(expected, done.stdout.strip().splitlines()[-1]), done.stdout
