"""Reads each file in a process of its own and prints, as a line of JSON, what that took and how it ended.

    ls FILE... | python measured_reading.py

A process is forked when everything is imported: what is measured is the reading.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path

from gracetune.config import Environment, load
from gracetune.errors import ConfigError

LONGEST_S, MOST_BYTES = 30, 2 << 30
"""Where a reading is given up; what is good enough is the test's business."""


def main(files: list[str]) -> None:
    _read(Path(files[0]).parent)  # what is imported late is imported now
    for file in files:
        print(json.dumps({"file": file, **_measured(Path(file))}), flush=True)


def _measured(path: Path) -> dict[str, object]:
    reader, writer = os.pipe()
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_S, LONGEST_S))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcome = _read(path)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writer, json.dumps({"outcome": outcome, "kib": grown}).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read()
    _, status, usage = os.wait4(child, 0)
    seconds = time.perf_counter() - began
    found = json.loads(message) if message else {"outcome": f"ended by status {status}", "kib": usage.ru_maxrss}
    return {"seconds": seconds, "cpu": usage.ru_utime + usage.ru_stime, **found}


def _read(path: Path) -> str:
    try:
        load(path, environment=Environment({"A": "a" * 100_000, "HOME": "/home/someone"}))
    except ConfigError as error:
        bad = [one for one in error.problems if not (one.key and one.found and one.expected and one.hint)]
        return f"an incomplete problem: {bad[0]}" if bad else "refused"
    except BaseException:  # noqa: BLE001 - this is what is looked for
        return traceback.format_exc()[-600:]
    return "read"


if __name__ == "__main__":
    main(sys.stdin.read().splitlines())
