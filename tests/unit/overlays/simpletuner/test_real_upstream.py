"""The real thing, where an environment with it is there; `scripts/test_upstream_features.sh --install` makes one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from unit.overlays.simpletuner.conftest import ROOT

VENV = Path(os.environ.get("UPSTREAM_VENV") or Path.home() / ".cache" / "gracetune" / "upstream-simpletuner")


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.skipif(
    not (VENV / "bin" / "simpletuner").is_file(),
    reason=f"no SimpleTuner in {VENV}: scripts/test_upstream_features.sh --install makes one, UPSTREAM_VENV names one",
)
@pytest.mark.parametrize("level", ["integration", "system"])
def test_the_overlay_on_the_real_upstream(level: str) -> None:
    script = ROOT / "scripts" / "test_upstream_features.sh"
    done = subprocess.run(
        [str(script), "--venv", str(VENV), "--level", level], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
