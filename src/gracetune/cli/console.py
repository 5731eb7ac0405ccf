"""How commands talk: results on stdout, everything else on stderr, JSON alone when asked for."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from gracetune.cli.streams import CLOSED_PIPE, OutputLostError, StandardStreams, open_streams
from gracetune.errors import ConfigError, GracetuneError, Problem, short, visible
from gracetune.redaction import Redactor, redact, redact_values
from gracetune.storage.os_errors import FileError, problem_of
from gracetune.telemetry.errors import TelemetryError

if TYPE_CHECKING:  # the schema takes longer to import than help takes to print
    from gracetune.config import Environment, Resolved

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Session:
    """What `start` saw before any command ran: the environment as the user set it, and where output goes."""

    environment: Environment
    streams: StandardStreams = field(default_factory=StandardStreams)
    redactor: Redactor = field(default_factory=Redactor)
    """What it knows is not printed."""

    def load(self, path: Path, overrides: Sequence[str] | None = None, *, allow_unsupported: bool = False) -> Resolved:
        """A config of any dialect. From here on its secrets are known."""
        from gracetune.config import load

        resolved = load(
            path, environment=self.environment, overrides=overrides or (), allow_unsupported=allow_unsupported
        )
        self.redactor.merge(resolved.redactor)
        return resolved


def start(run: Callable[[Session], int], *, as_json: bool = False) -> int:
    """Every entry point begins here. Returns the exit code; an error of ours becomes a message on stderr and 1.

    With `as_json` an object about it is on stdout, where a script looks for the result. Output that cannot be written
    raises nothing. If the result of a command is lost with it, the exit code says so (`StandardStreams`).
    """
    return _guarded(lambda streams, redactor: run(_session(streams, redactor)), as_json=as_json)


def start_bare(run: Callable[[], int], *, as_json: bool = False) -> int:
    """The same for what needs neither the environment nor a config: help and version."""
    return _guarded(lambda streams, redactor: run(), as_json=as_json)


def _session(streams: StandardStreams, redactor: Redactor) -> Session:
    from gracetune.config.environment import Environment, claim_allocator_options, torch_accepts_uvm_options

    environment = Environment.capture()
    redactor.learn(environment.variables)
    # Before anything can import torch: a stock PyTorch stops at allocator options it does not know.
    for line in claim_allocator_options(torch_takes_them=torch_accepts_uvm_options()):
        print(line, file=sys.stderr)
    return Session(environment, streams, redactor)


_Action = Callable[[StandardStreams, Redactor], int]


def _guarded(run: _Action, *, as_json: bool) -> int:
    redactor = Redactor()
    streams = open_streams(redactor)
    gone = False
    try:
        code = _run(run, streams, redactor, as_json=as_json)
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            raise
        code, gone = ended.code or 0, isinstance(ended, OutputLostError)
    finally:
        lost = streams.close()
    if lost is None:
        return code
    if lost.errno == errno.EPIPE:  # the reader has all it wants
        return CLOSED_PIPE if gone else code or CLOSED_PIPE
    print_error(GracetuneError(f"the output is incomplete: stdout cannot be written: {lost.strerror}"))
    return 1


def _run(run: _Action, streams: StandardStreams, redactor: Redactor, *, as_json: bool) -> int:
    try:
        return run(streams, redactor)
    except GracetuneError as error:
        ours = error
    except TelemetryError as error:  # telemetry knows nothing of ours, not even our errors
        ours = GracetuneError(str(error))
    except OSError as error:  # for whatever has no words of its own
        if isinstance(error.filename, str):
            ours = FileError(problem_of(error, "file", Path(error.filename), access="read"))
        elif error.errno in NO_SPACE:
            ours = GracetuneError("no space left on the disk: make room and run the same command again")
        else:
            raise
    print_error(ours)
    if as_json:
        problems = ours.problems if isinstance(ours, ConfigError) else ()
        with suppress(OutputLostError):
            print_json({"ok": False, "error": str(ours), "problems": [problem_json(one) for one in problems]})
    return 1


def session(context: typer.Context) -> Session:
    """The session of this invocation; a fresh one when a command is run outside `start`, as tests do."""
    from gracetune.config import Environment

    found = context.find_object(Session)
    return found if found is not None else Session(Environment.capture())


def out() -> Console:
    return Console(highlight=False, soft_wrap=True)


def print_json(value: Any, *, is_schema: bool = False) -> None:
    """A schema has names of secrets, with what describes them in the place of values."""
    if not is_schema:
        value = redact_values(value)  # before quotes and escapes are around it
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # JSON's own escapes can be read back, unlike a terminal's; and what steers a terminal must not reach it.
    if not (text.isascii() or _can_be_shown(text)):
        text = json.dumps(value, indent=2)
    print(text)


def _can_be_shown(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return text.replace("\n", "").isprintable()


def mark(console: Console, *, ok: bool) -> str:
    """A tick or a cross, or what stands for it where the terminal has neither."""
    good, bad = ("✓", "✗") if console.encoding.lower().startswith("utf") else ("ok", "X")
    return f"[bold green]{good}[/]" if ok else f"[bold red]{bad}[/]"


def print_error(error: GracetuneError) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if isinstance(error, ConfigError):
        print_problems(console, error.problems)
    else:
        lines = "\n".join(visible(line) for line in str(error).split("\n"))
        console.print(f"[bold red]error[/] {escape(lines)}")
    sys.stderr.flush()


def problem_json(problem: Problem) -> dict[str, Any]:
    return {"key": problem.key, "found": problem.found, "expected": problem.expected, "hint": problem.hint,
            "file": problem.file}  # fmt: skip


def print_problems(console: Console, problems: tuple[Problem, ...], file: str | None = None) -> None:
    """`file` is the one already named above the list."""
    for problem in problems:
        location = f"{problem.file}: " if problem.file and problem.file != file else ""
        console.print(f"{mark(console, ok=False)} {shown(location)}[bold]{escape(short(problem.key))}[/]")
        console.print(f"    found     {shown(problem.found)}")
        console.print(f"    expected  {shown(problem.expected)}")
        console.print(f"    try       {shown(problem.hint)}")


def shown(text: str) -> str:
    """What users wrote is quoted in what we say; it must neither style it nor steer the terminal, nor be a secret."""
    return escape(visible(redact(text)))
