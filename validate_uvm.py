#!/usr/bin/env python3
"""Does unified memory work here? Allocate, hint, move, read back, spill, and time every path; exits 1 if one fails.

    python validate_uvm.py [--device 0] [--oversubscription-scale 1.5] [--force-oversubscription] [--json]

The test beyond the GPU's memory runs only where the driver reports a coherent link, or when it is forced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

try:
    from gracetune.cli.console import start
    from gracetune.cli.validate import run_validation
    from gracetune.hardware.allocation import DEFAULT_SCALE
except ModuleNotFoundError as missing:
    sys.exit(f"validate_uvm.py needs the module {missing.name}. Install gracetune first: pip install -e .")


def main(arguments: Sequence[str] | None = None) -> int:
    return start(lambda _session: run(arguments))


def run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description="Try everything the unified-memory layer relies on.")
    parser.add_argument("--device", type=int, default=0, help="GPU to use (default: %(default)s)")
    parser.add_argument(
        "--oversubscription-scale",
        type=float,
        default=DEFAULT_SCALE,
        metavar="X",
        help="size of the allocation test, in multiples of the GPU's memory (default: %(default)s)",
    )
    parser.add_argument(
        "--force-oversubscription",
        action="store_true",
        help="go beyond the GPU's memory even without a coherent link; can hang the machine until a reboot",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    given = parser.parse_args(arguments)
    return run_validation(
        given.device,
        scale=given.oversubscription_scale,
        force=given.force_oversubscription,
        as_json=given.json,
    )


if __name__ == "__main__":
    raise SystemExit(main())
