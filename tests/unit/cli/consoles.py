"""Runs `gracetune` in a separate process, with descriptors 1 and 2 chosen by the test."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from gracetune.cli.main import main
from unit.cache.processes import Child

Connect = Callable[[], None]


def gracetune(connect: Connect, *arguments: str) -> Child:
    """Run the command in a forked process, which starts at once. It reports the exit code that `main` exits with."""

    def work(report: Callable[[str], None]) -> None:
        connect()
        sys.stdout, sys.stderr = (_stream(number) for number in (1, 2))  # as Python opens them at its start
        code = None
        try:
            main([*arguments])
        except SystemExit as ended:
            code = ended.code
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # as Python does at its end, where a failure makes the exit code 120
        report(str(code))

    return Child(work)


def _stream(number: int) -> io.TextIOWrapper:
    try:
        return io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", line_buffering=True)
    except OSError:
        return None  # type: ignore[return-value]  # what Python has in `sys` for a closed descriptor


def both_to(descriptor: int) -> Connect:
    def connect() -> None:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)

    return connect
