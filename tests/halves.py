"""The test files in two parts that take about equally long. `make test` and `make test-full` run one process for each.

`seconds.txt` holds the seconds of each file under `make test` that takes more than half a second, `seconds_full.txt`
those under `make test-full`. To write them anew:

    PYTEST_ADDOPTS=--durations=0 make test > log
    .venv/bin/python tests/halves.py everyday < log
    PYTEST_ADDOPTS=--durations=0 make test-full > log
    .venv/bin/python tests/halves.py full < log
"""

from __future__ import annotations

import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SECONDS = {"everyday": TESTS / "seconds.txt", "full": TESTS / "seconds_full.txt"}
OTHERS = 0.2
"""Seconds of a file that is not listed."""
DURATION = re.compile(r"([\d.]+)s (?:setup|call|teardown) +tests/(\S+?\.py)::")


def expected(lane: str) -> dict[Path, float]:
    """The seconds of every test file, in the order they run."""
    known = {name: float(taken) for taken, name in map(str.split, SECONDS[lane].read_text().splitlines())}
    return {file: known.get(str(file.relative_to(TESTS)), OTHERS) for file in sorted(TESTS.rglob("test_*.py"))}


@functools.cache
def half(lane: str, number: int) -> frozenset[Path]:
    """The files of the first (1) or the second half (2), cut where both sides are closest to equal."""
    files, taken = [*expected(lane)], [*expected(lane).values()]
    cut = min(range(len(files) + 1), key=lambda place: abs(sum(taken[:place]) - sum(taken[place:])))
    return frozenset(files[:cut] if number == 1 else files[cut:])


def seconds(log: Iterable[str]) -> str:
    """One line for each file, from the durations that pytest printed."""
    sums: dict[str, float] = defaultdict(float)
    for line in log:
        if found := DURATION.match(line):
            sums[found[2]] += float(found[1])
    return "".join(f"{taken:.1f} {name}\n" for name, taken in sorted(sums.items()) if taken > 0.5)


if __name__ == "__main__":
    SECONDS[sys.argv[1]].write_text(seconds(sys.stdin))
