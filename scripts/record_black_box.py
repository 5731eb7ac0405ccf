#!/usr/bin/env python3
"""Record what gracetune shows to the outside, or compare it with what is recorded (tests/golden/black_box).

    python scripts/record_black_box.py --check            compare; exit 1 and a line for each difference
    python scripts/record_black_box.py                    record again, and print what changed
    python scripts/record_black_box.py examples tools     only these groups

The runs below tests/golden/black_box/runs were begun by an earlier commit, and every later one must be able to resume
them: only --new-runs records them again. tests/runs/test_black_box.py makes the same comparison.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

# Before torch is imported: one thread, as in the tests. Sums of several threads differ in their last bits.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from runs import black_box


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(black_box.GROUPS)}; all without it")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--new-runs", action="store_true", help="record the runs that are resumed again")
    requested = parser.parse_args()
    unknown = sorted(set(requested.groups) - set(black_box.GROUPS))
    if unknown:
        parser.error(f"no such group: {', '.join(unknown)}; there are {', '.join(black_box.GROUPS)}")
    with tempfile.TemporaryDirectory() as folder:
        if requested.new_runs:
            begin_runs(Path(folder))
        changes = sum(
            changed(name, Path(folder), check=requested.check) for name in requested.groups or black_box.GROUPS
        )
    print(f"{changes} differences from {black_box.RECORDED}")
    return 1 if requested.check and changes else 0


def begin_runs(folder: Path) -> None:
    """Runs that resume to what the same run does in one go; any other would be a poor measure."""
    work = black_box.Work.prepared(folder / "new-runs", folder / "models")
    for name in black_box.RUNS:
        black_box.begin_run(work, name)
        parted, whole = black_box.resume_run(work, name)["steps"], black_box.uninterrupted_steps(work, name)
        if parted != whole:
            sys.exit(f"{name}: resumed {parted}, in one go {whole}")


def changed(name: str, folder: Path, *, check: bool) -> int:
    """Compares one group, prints the differences, and writes it unless it is only checked."""
    begun = time.process_time()
    now = black_box.record(name, black_box.Work.prepared(folder / name, folder / "models"))
    print(f"{name}: {time.process_time() - begun:.1f} s of CPU time")
    existing = (black_box.RECORDED / f"{name}.json").is_file()
    found = black_box.differences(black_box.read(name), now) if existing else ["not recorded yet"]
    for line in found:
        print(f"{name}: {line}")
    if not check and (found or black_box.read(name)["cpu_probe"] != now["cpu_probe"]):
        black_box.write(name, now)
    return len(found)


if __name__ == "__main__":
    raise SystemExit(main())
