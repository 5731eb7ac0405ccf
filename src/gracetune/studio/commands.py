"""Our own commands as child processes, with their JSON output.

Whatever imports torch or reads untrusted data at length runs here, so that the studio stays small, cannot die of it and
can end it after a time limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread

from gracetune.config.environment import Environment
from gracetune.errors import short
from gracetune.studio.replies import StudioError

AT_ONCE = 2
"""Most commands that run at the same time; the others wait."""
_LINES = 12
_THREADS = 12
T = TypeVar("T")


class _RunningCommands:
    """The commands that run now, of one studio."""

    def __init__(self) -> None:
        self.free = threading.BoundedSemaphore(AT_ONCE)
        self._mutex, self._is_closed = threading.Lock(), False
        self._processes: set[subprocess.Popen[bytes]] = set()

    def add(self, process: subprocess.Popen[bytes]) -> None:
        with self._mutex:
            self._processes.add(process)
            if self._is_closed:
                process.kill()

    def discard(self, process: subprocess.Popen[bytes]) -> None:
        with self._mutex:
            self._processes.discard(process)

    def close(self) -> None:
        with self._mutex:
            self._is_closed = True
            for process in self._processes:
                process.kill()


@dataclass(frozen=True)
class CommandRunner:
    """Runs commands in `folder`, against which they resolve relative paths."""

    environment: Environment
    folder: Path
    _running: _RunningCommands = field(default_factory=_RunningCommands)

    def close(self) -> None:
        """End the commands that run, and all later ones: the studio stops, and does not wait for them."""
        self._running.close()

    def json(self, *arguments: str, timeout_s: float) -> dict[str, Any]:
        """The JSON object that the command prints, also if it ends with an error.

        Raises StudioError if it prints none or takes too long. `timeout_s` begins when the command starts, not while it
        waits for its turn.
        """
        with self._running.free:
            output, errors, code = self._run(arguments, timeout_s)
        try:
            value = json.loads(output)
        except (ValueError, RecursionError):
            last = " ".join(errors.decode(errors="replace").splitlines()[-_LINES:])
            raise StudioError(
                422,
                f"{_words(arguments)} ended with exit code {code} and no result: {short(last, 600)}",
                "one JSON object",
                f"run it on a terminal: {_words(arguments)}",
            ) from None
        return value if isinstance(value, dict) else {"value": value}

    def _run(self, arguments: Sequence[str], timeout_s: float) -> tuple[bytes, bytes, int]:
        # A session of its own: Ctrl-C in the studio's terminal is not meant for it, and it has no terminal to ask on.
        with subprocess.Popen(
            command_line(*arguments), cwd=self.folder, env=dict(self.environment.variables), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            self._running.add(process)
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise StudioError(
                    422, f"{_words(arguments)} took more than {timeout_s:g} s", "an answer by then",
                    f"run it on a terminal: {_words(arguments)}",
                ) from None  # fmt: skip
            finally:
                self._running.discard(process)
        return output, errors, process.returncode


class SlowWork:
    """Runs what takes long in at most `_THREADS` threads per instance, so that quick requests find a free one."""

    def __init__(self) -> None:
        self._limiter = CapacityLimiter(_THREADS)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        return await to_thread.run_sync(function, *arguments, limiter=self._limiter)


def command_line(*arguments: str) -> list[str]:
    """The command line of one of our commands, run by this Python."""
    return [sys.executable, "-m", "gracetune", *arguments]


def reject_errors(answer: Mapping[str, Any]) -> None:
    """Raise the error that a command printed as JSON; an answer of another kind passes."""
    if answer.get("ok") is False and "error" in answer:
        problems = answer.get("problems") or []
        first = problems[0] if problems else {}
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        found = f"{first['key']}: {first['found']}{more}" if first else str(answer["error"])
        raise StudioError(
            422,
            found,
            str(first.get("expected", "a valid request")),
            str(first.get("hint", "correct what the message names and try again")),
        )


def _words(arguments: Sequence[str]) -> str:
    return short(" ".join(("gracetune", *arguments)), 200)
