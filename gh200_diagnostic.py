#!/usr/bin/env python3
"""The machine check of the GH200 guides: the same examination as `gracetune doctor`, under its older name and flags.

Always writes the JSON report; exits 1 when a check fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from gracetune.cli.console import Session, start
    from gracetune.cli.doctor import DoctorOptions, run_doctor
    from gracetune.hardware.allocation import DEFAULT_SCALE
except ModuleNotFoundError as missing:
    sys.exit(f"gh200_diagnostic.py needs the module {missing.name}. Install gracetune first: pip install -e .")


def main(arguments: Sequence[str] | None = None) -> int:
    return start(lambda session: run(session, arguments))


def run(session: Session, arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description="Examine this machine (the same as: gracetune doctor).")
    parser.add_argument(
        "--oversubscription-scale",
        type=float,
        default=DEFAULT_SCALE,
        metavar="X",
        help="size of the allocation test, in multiples of the GPU's memory (default: %(default)s)",
    )
    parser.add_argument("--skip-allocation", action="store_true", help="leave the allocation test out")
    parser.add_argument(
        "--force-oversubscription",
        action="store_true",
        help="go beyond the GPU's memory even without a coherent link; can hang the machine until a reboot",
    )
    parser.add_argument("--require-gpu", action="store_true", help="fail where there is no usable GPU")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("gh200_diagnostic_report.json"),
        metavar="FILE",
        help="where the JSON report goes (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the JSON report and nothing else")
    given = parser.parse_args(arguments)
    options = DoctorOptions(
        scale=given.oversubscription_scale,
        skip_allocation=given.skip_allocation,
        force_oversubscription=given.force_oversubscription,
        require_gpu=given.require_gpu,
        output=given.output,
        json=given.json,
    )
    return run_doctor(options, session.environment)


if __name__ == "__main__":
    raise SystemExit(main())
