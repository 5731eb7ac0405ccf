"""Load a randomly filled Wan 14B transformer and hold the host's peak against the largest shard.

python benchmarks/load_14b.py --output benchmarks/results/loading-NAME.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

from gracetune.bench.loading import DenoiserSize, measure
from gracetune.bench.results import result_of
from gracetune.cli.bench import print_rows
from gracetune.cli.console import out
from gracetune.errors import GracetuneError
from gracetune.hardware import probe
from gracetune.units import parse_bytes


def main() -> int:
    default = DenoiserSize()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=default.layers)
    parser.add_argument("--heads", type=int, default=default.heads, help="of 128 channels each")
    parser.add_argument("--ffn", type=int, default=default.ffn)
    parser.add_argument("--shard", type=parse_bytes, default=default.shard_bytes, metavar="SIZE", help="such as 5GiB")
    parser.add_argument("--device", type=torch.device, default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--below", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to measure"
    )
    parser.add_argument("--output", type=Path, help="also write the result there, as JSON")
    requested = parser.parse_args()
    try:
        rows = measure(
            requested.device,
            DenoiserSize(requested.layers, requested.heads, requested.ffn, requested.shard),
            requested.below,
        )
    except GracetuneError as error:
        print(error, file=sys.stderr)
        return 1
    print_rows(out(), rows)
    if requested.output is not None:
        requested.output.write_text(json.dumps(result_of("loading", rows, probe()), indent=2) + "\n", encoding="utf-8")
    return 1 if any(row.ok is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
