"""The losses of single samples that `gracetune data judge` measured: `report/judged/losses.json` in a run's folder.

    {"format": "gracetune-judged-losses", "version": 1, "made_s": 1.0, "step": 100,
     "images": [{"dataset": "photos", "path": "a.png", "first_loss": 0.2, "last_loss": 0.1, ...}],
     "findings": [{"kind": "duplicate", "dataset": "photos", "images": ["a.png", "b.png"], "reason": "..."}], ...}

All other keys are those of `gracetune data judge --json`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gracetune.storage.atomic import write_file
from gracetune.storage.regular_files import read_small_file
from gracetune.telemetry.report.sections import FOLDER

LOSSES_FORMAT, LOSSES_VERSION = "gracetune-judged-losses", 1
_FILE = Path(FOLDER) / "judged" / "losses.json"

Sample = tuple[str, str]
"""Id of the dataset, and path of the file in it."""


@dataclass(frozen=True)
class JudgedLosses:
    losses: Mapping[Sample, tuple[float, float]] = field(default_factory=dict)
    """The loss before training and after it."""
    findings: Mapping[Sample, tuple[str, ...]] = field(default_factory=dict)


def write_losses(run_folder: Path, judgement: Mapping[str, Any]) -> None:
    """Write the result of a judgement. It replaces an earlier one."""
    path = run_folder / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {"format": LOSSES_FORMAT, "version": LOSSES_VERSION, "made_s": time.time(), **judgement}
    write_file(path, f"{json.dumps(value, indent=1)}\n".encode())


def read_losses(run_folder: Path) -> JudgedLosses | None:
    """The losses of the last judgement; None if there is none that this release can read."""
    try:
        value = json.loads(read_small_file(run_folder / _FILE))
        if (value["format"], value["version"]) != (LOSSES_FORMAT, LOSSES_VERSION):
            return None
        losses = {
            (str(one["dataset"]), str(one["path"])): (float(one["first_loss"]), float(one["last_loss"]))
            for one in value["images"]
        }
        findings: dict[Sample, tuple[str, ...]] = {}
        for one in value["findings"]:
            for path in one["images"]:
                sample = (str(one["dataset"]), str(path))
                findings[sample] = (*findings.get(sample, ()), f"{one['kind']}: {one['reason']}")
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return JudgedLosses(losses, findings)
