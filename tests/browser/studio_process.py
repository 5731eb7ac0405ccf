"""A real `gracetune studio` and real tiny runs, in their own processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from runs.launched import COMMAND

LINK = re.compile(r"(http://127\.0\.0\.1:\d+/[^\s?]*)\?token=\S+")
START_S = 60.0


@dataclass(frozen=True)
class Studio:
    root: Path
    """The folder whose runs it shows."""
    link: str
    """The printed link, with the token."""

    @property
    def address(self) -> str:
        return self.link.partition("?")[0]


def wait_for(found: Any, what: str, seconds: float = START_S) -> Any:
    """Call `found` until it returns something true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds} s")


@contextmanager
def process(*arguments: str, output: Path, before: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """`gracetune` with these arguments until the block ends. Its output goes to a file: a full pipe would stop it.

    `before` is Python that its process runs first.
    """
    with output.open("wb") as stream:
        started = _start(before, arguments, stream)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def _start(before: str, arguments: tuple[str, ...], stream: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", f"{before}\n{COMMAND}", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment)


@contextmanager
def studio(root: Path, *options: str) -> Iterator[Studio]:
    """A studio on a free port."""
    output = root.parent / f"studio-{root.name}.txt"
    with process("studio", str(root), "--port", "0", *options, output=output) as started:

        def link() -> str | None:
            if started.poll() is not None:
                raise AssertionError(output.read_text())
            found = LINK.search(output.read_text())
            return found[0] if found else None

        yield Studio(root, wait_for(link, "the studio's link"))


def events(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; the last one may be incomplete."""
    log = run / "logs" / "events.jsonl"
    if not log.is_file():
        return []
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def steps_done(run: Path) -> int:
    return max((line["step"] for line in events(run) if line["kind"] == "StepDone"), default=0)
