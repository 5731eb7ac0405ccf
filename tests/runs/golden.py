"""The losses of one short run per family, written to tests/golden/losses.json: `python tests/runs/golden.py`.

Made with one thread; the file says on what. To be run again when losses are meant to change, and the change explained.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "golden" / "losses.json"
SECTIONS: dict[str, Any] = {"training": {"max_steps": 3, "batch_size": 2}, "optimizer": {"lr": 1e-3}}


def machine() -> dict[str, str]:
    import diffusers
    import torch

    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }


def made() -> dict[str, Any]:
    from gracetune.models.tiny import cached
    from runs.made_runs import FLAVOURS, config_for, run
    from runs.test_resume import losses

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for family in FLAVOURS:
            config = config_for(
                family, lambda f, flavour: cached(f, flavour, root / "models"), root / family, **SECTIONS
            )
            run(config)
            found[family] = [loss for _, _, loss, _ in losses(config)]
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    FILE.write_text(json.dumps({"made_on": machine(), "losses": made()}, indent=1) + "\n")
