from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
def test_kernels_match_the_plain_arithmetic() -> None:
    """Runs in a subprocess, because Triton chooses the interpreter when it is imported."""
    script = Path(__file__).with_name("kernels_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not know this numpy")
    assert done.stdout.strip() == "5 cases agree", done.stderr
