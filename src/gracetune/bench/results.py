"""Bench results as JSON: the rows, and everything needed to compare them later."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gracetune import __version__
from gracetune.hardware import Machine
from gracetune.storage.atomic import write_file

RESULT_FORMAT: Final = 1


def result_of(name: str, rows: Sequence[Any], machine: Machine) -> dict[str, Any]:
    """The JSON object of a result; `rows` are dataclasses."""
    return {
        "format": RESULT_FORMAT,
        "bench": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "git_commit": git_commit(),
        "gpu": machine.gpus[0].name if machine.gpus else None,
        "profile": machine.profile.value,
        "versions": {"gracetune": __version__, **machine.software.model_dump(mode="json")},
        "machine": machine.model_dump(mode="json"),
        "rows": [asdict(row) for row in rows],
    }


def command_line() -> str:
    """The command to type again in a checkout. The scripts in `benchmarks` write such results too."""
    script = Path(sys.argv[0])
    begin = f"python benchmarks/{script.name}" if script.parent.name == "benchmarks" else "gracetune"
    return " ".join([begin, *sys.argv[1:]])


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write atomically: an interrupted bench keeps its previous result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, f"{json.dumps(result, indent=2)}\n".encode())


def git_commit() -> str | None:
    """The commit of this checkout, marked `-dirty` if files differ from it; None outside a checkout."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
