"""Make file operations of another process fail as a bad disk does, by a small library that is preloaded into it.

    with failing("*/checkpoints/*", "sync", errno.EIO, after=2) as environment:
        subprocess.run(command, env={**os.environ, **environment})

The process gets EIO from its third fsync below a folder `checkpoints` on, and from no other call. `shim.c` lists the
operations. Only calls through the C library are seen: those of Python, torch and safetensors, and not what is read
through a memory map.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Operation = Literal[
    "open", "read", "write", "sync", "rename", "link", "unlink", "mkdir", "stat", "list", "lock", "truncate", "room",
    "map", "any",
]  # fmt: skip
_RULES, _LOG = "GRACETUNE_TEST_FAULTS", "GRACETUNE_TEST_FAULTS_LOG"


@dataclass(frozen=True)
class Fault:
    pattern: str
    """Of absolute paths, as in a shell; `*` matches slashes too."""
    operation: Operation
    action: int | Literal["kill", "term", "hup", "short", "list"]
    """An error number, or a signal before the call, or half of a write, or a line in the log."""
    after: int = 0
    """So many matching calls succeed before."""
    times: int = 0
    """So many fail then; 0: all."""

    def __str__(self) -> str:
        return f"{self.operation} {self.action} {self.after} {self.times} {self.pattern}"


@contextmanager
def failing(
    path_pattern: str, operation: Operation, errno: int, *, after: int = 0, times: int = 0
) -> Iterator[dict[str, str]]:
    """The environment of a process whose matching calls fail with that error number."""
    yield environment_of([Fault(path_pattern, operation, errno, after, times)])


def environment_of(faults: list[Fault], log: Path | None = None) -> dict[str, str]:
    lines = "\n".join(str(fault) for fault in faults)
    return {"LD_PRELOAD": str(library()), _RULES: lines, _LOG: "" if log is None else str(log)}


@functools.cache
def library() -> Path:
    """Compiled once for all tests of this process; removed with it."""
    folder = tempfile.TemporaryDirectory(prefix="gracetune-faults-")
    _kept.append(folder)
    path = Path(folder.name) / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", path, source, "-ldl"], check=True)
    return path


_kept: list[tempfile.TemporaryDirectory[str]] = []
