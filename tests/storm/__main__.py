"""`make storm`: many cases, a table of them, and exit code 1 if one of them is wrong.

PYTHONPATH=tests python -m storm --cases 500 --seed 1 --output FILE    a storm
PYTHONPATH=tests python -m storm kill:native-lora:17                   one case, with what it did
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import conftest  # noqa: F401 - the environment of all tests
from gracetune.bench.results import result_of, write_result
from gracetune.hardware import probe
from storm.cases import Case, storm
from storm.runner import Outcome, Storm
from storm.scenarios import SCENARIOS


@dataclass(frozen=True)
class Row:
    dialect: str
    disturbance: str
    cases: int
    right: int
    wrong: int
    not_met: int
    """The run ended before the moment came."""
    seconds: float


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        key = (SCENARIOS[outcome.case.scenario].dialect, outcome.case.group)
        groups.setdefault(key, []).append(outcome)
    return [_row(*key, groups[key]) for key in sorted(groups)]


def _row(dialect: str, disturbance: str, group: Sequence[Outcome]) -> Row:
    wrong = sum(bool(one.wrong) for one in group)
    not_met = sum(not one.was_met for one in group)
    seconds = round(sum(one.seconds for one in group), 1)
    return Row(dialect, disturbance, len(group), len(group) - wrong, wrong, not_met, seconds)


def table(rows: Sequence[Row]) -> str:
    whole = Row("all", "", *(sum(column) for column in zip(*(_figures(row) for row in rows), strict=True)))
    head = f"{'dialect':12} {'disturbance':12} {'cases':>6} {'right':>6} {'wrong':>6} {'not met':>8} {'seconds':>9}"
    lines = [
        f"{row.dialect:12} {row.disturbance:12} {row.cases:6} {row.right:6} {row.wrong:6} {row.not_met:8} "
        f"{row.seconds:9.1f}"
        for row in [*rows, whole]
    ]
    return "\n".join([head, *lines])


def _figures(row: Row) -> tuple[int, int, int, int, float]:
    return row.cases, row.right, row.wrong, row.not_met, row.seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m storm")
    parser.add_argument("case", nargs="*", type=Case.parse, help="KIND:SCENARIO:SEED; none: a storm")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a JSON file for the table")
    parser.add_argument("--keep", type=Path, help="a new folder, where runs that are wrong stay")
    parser.add_argument("--prepare", default="", help="module:function that breaks gracetune first (storm.sabotage)")
    requested = parser.parse_args(arguments)
    cases = requested.case or storm(requested.cases, requested.seed)
    began = time.monotonic()
    outcomes = []
    with ExitStack() as stack:
        root = requested.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="gracetune-storm-"))
        own = stack.enter_context(Storm(Path(root), workers=requested.workers))
        for future in as_completed([own.submit(case, prepare=requested.prepare) for case in cases]):
            outcomes.append(outcome := future.result())
            if outcome.wrong or requested.case:
                print(outcome.describe(), flush=True)
            elif len(outcomes) % 25 == 0:
                print(f"{len(outcomes)} of {len(cases)} cases, {time.monotonic() - began:.0f} s", flush=True)
    rows = rows_of(outcomes)
    print(
        f"\n{table(rows)}\n\n{len(outcomes)} cases, {time.monotonic() - began:.0f} s with {requested.workers} workers"
    )
    wrong = sorted(str(outcome.case) for outcome in outcomes if outcome.wrong)
    if wrong:
        print(f"wrong: {' '.join(wrong)}")
    if requested.output:
        result = result_of("storm", rows, probe())
        command = f"make storm STORM_CASES={len(cases)} STORM_SEED={requested.seed}"
        write_result(requested.output, {**result, "command": command, "wrong": wrong})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
