"""Output and errors of commands. Results go to stdout, all else to stderr. With --json, stdout has one JSON object."""

from __future__ import annotations

import errno
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.text import Text

from gracetune.cli.streams import CLOSED_PIPE, OutputLostError, StandardStreams, open_streams
from gracetune.errors import ConfigError, GracetuneError, Problem, short, visible
from gracetune.redaction import Redactor, redact, redact_values
from gracetune.storage.os_errors import FileError, is_of_disk, problem_of
from gracetune.telemetry.errors import TelemetryError

if TYPE_CHECKING:  # importing the config schema takes longer than printing a help text
    from gracetune.config import Environment, Resolved

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NARROWEST = 24
_LABEL = re.compile(r"\s*(?:(?:found|expected|try) +)?")
"""A line's beginning, under which the lines that it is wrapped to are indented."""


@dataclass(frozen=True)
class Session:
    """The state that `start` captures before a command runs: the user's environment, and where output goes."""

    environment: Environment
    streams: StandardStreams = field(default_factory=StandardStreams)
    redactor: Redactor = field(default_factory=Redactor)
    """Removes secrets from all output."""

    def load(self, path: Path, overrides: Sequence[str] | None = None, *, allow_unsupported: bool = False) -> Resolved:
        """Load a config of any dialect. From then on, its secrets are redacted from all output."""
        from gracetune.config import load

        resolved = load(
            path, environment=self.environment, overrides=overrides or (), allow_unsupported=allow_unsupported
        )
        self.redactor.merge(resolved.redactor)
        return resolved


def start(run: Callable[[Session], int], *, as_json: bool = False) -> int:
    """Run a command; every entry point begins here. Returns the exit code.

    A `GracetuneError` becomes a message on stderr and exit code 1. With `as_json`, stdout also gets an object with the
    error, because that is where a script reads the result. Output that cannot be written raises nothing. If the result
    of a command is lost that way, the exit code reports it (`StandardStreams`).
    """
    return _run_guarded(lambda streams, redactor: run(_session(streams, redactor)), as_json=as_json)


def start_bare(run: Callable[[], int], *, as_json: bool = False) -> int:
    """Like `start`, for what needs neither the environment nor a config: help and version."""
    return _run_guarded(lambda streams, redactor: run(), as_json=as_json)


def _session(streams: StandardStreams, redactor: Redactor) -> Session:
    from gracetune.config.environment import Environment, claim_allocator_options, torch_accepts_uvm_options

    environment = Environment.capture()
    redactor.learn(environment.variables)
    # Before anything imports torch: stock PyTorch fails on allocator options that it does not know.
    for line in claim_allocator_options(torch_takes_them=torch_accepts_uvm_options()):
        print(line, file=sys.stderr)
    return Session(environment, streams, redactor)


_Action = Callable[[StandardStreams, Redactor], int]


def _run_guarded(run: _Action, *, as_json: bool) -> int:
    redactor = Redactor()
    streams = open_streams(redactor)
    ended_by_lost_output = False
    try:
        code = _run(run, streams, redactor, as_json=as_json)
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            raise
        code, ended_by_lost_output = ended.code or 0, isinstance(ended, OutputLostError)
    finally:
        lost = streams.close()
    if lost is None:
        return code
    if lost.errno == errno.EPIPE:  # the reader closed the pipe, as `head` does: not an error worth a message
        return CLOSED_PIPE if ended_by_lost_output else code or CLOSED_PIPE
    print_error(GracetuneError(f"the output is incomplete: stdout cannot be written: {lost.strerror}"))
    return 1


def _run(run: _Action, streams: StandardStreams, redactor: Redactor, *, as_json: bool) -> int:
    try:
        return run(streams, redactor)
    except GracetuneError as error:
        ours = error
    except TelemetryError as error:  # not a GracetuneError: telemetry may not import `gracetune.errors`
        ours = GracetuneError(str(error))
    except OSError as error:  # an operation that has no error message of its own
        if isinstance(error.filename, str):
            ours = FileError(problem_of(error, "file", Path(error.filename), access="read"))
        elif error.errno in NO_SPACE:
            ours = GracetuneError("no space left on the disk: make room and run the same command again")
        elif is_of_disk(error):  # of a descriptor: the file is not known
            why = error.strerror or str(error)
            ours = GracetuneError(
                f"a disk failed: {why}; look at `dmesg` and `findmnt`, then run the same command again"
            )
        else:
            raise
    print_error(ours)
    if as_json:
        problems = ours.problems if isinstance(ours, ConfigError) else ()
        with suppress(OutputLostError):
            print_json({"ok": False, "error": str(ours), "problems": [problem_json(one) for one in problems]})
    return 1


def session(context: typer.Context) -> Session:
    """The session of this invocation, or a new one if the command runs outside `start`, as in tests."""
    from gracetune.config import Environment

    found = context.find_object(Session)
    return found if found is not None else Session(Environment.capture())


class Output(Console):
    """On a terminal, wraps text between words, so that a path or a command is never broken inside a word.

    In a file or a pipe each text is one line, so that programs can search it.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True)

    def print(self, *objects: Any, **options: Any) -> None:
        if not self.is_terminal or len(objects) != 1 or not isinstance(objects[0], str):
            super().print(*objects, **options)
            return
        for line in self.render_str(objects[0], highlight=False).split(allow_blank=True):
            indent = len(line.plain) - len(line.plain.lstrip())
            first, *more = line.divide(_breaks(line.plain, self.width, indent))
            for part in (first, *(Text(" " * indent).append(one) for one in more)):
                part.rstrip()  # a space in the column after the last one would begin a line of its own
                super().print(part, **options)


def _breaks(line: str, width: int, indent: int) -> list[int]:
    """Where the lines after the first one begin. A word that is longer than a line has a line of its own."""
    begin, found = 0, []
    for word in re.finditer(r"\S+", line):
        if word.end() - begin > width and line[begin : word.start()].strip():
            begin = word.start() - indent
            found.append(word.start())
    return found


def out() -> Console:
    return Output()


@contextmanager
def spinner(what: str, *, visible: bool = True) -> Iterator[None]:
    """Say on stderr what a command waits for: with a spinner on a terminal, elsewhere as one line.

    It leaves `sys.stderr` as it is, because libraries that are imported meanwhile keep a reference to it.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not visible:
        yield
    elif not console.is_terminal:
        print(f"{what} ...", file=sys.stderr)
        yield
    else:
        status = Spinner("dots", text=f"{what} ...")
        with Live(status, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
            yield


def print_json(value: Any, *, is_schema: bool = False) -> None:
    """Print a value as JSON, without secrets. A schema is not redacted: the names of secrets are keys in it, but the
    values are descriptions."""
    if not is_schema:
        value = redact_values(value)  # before encoding: quotes and escapes would hide a secret from the redactor
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # JSON escapes, unlike those of the stream, can be parsed again. They also keep control characters off the terminal.
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
    """A tick or a cross, or "ok" and "X" if the terminal's encoding has neither."""
    good, bad = ("✓", "✗") if console.encoding.lower().startswith("utf") else ("ok", "X")
    return f"[bold green]{good}[/]" if ok else f"[bold red]{bad}[/]"


def print_error(error: GracetuneError) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if isinstance(error, ConfigError):
        print_problems(console, error.problems)
    else:
        first, *others = (visible(line) for line in str(error).split("\n"))
        _print_row(console, Text.assemble(("error ", "bold red")), first)
        for line in others:
            label = _LABEL.match(line)
            indent = label.end() if label is not None else 0
            _print_row(console, Text(line[:indent]), line[indent:])
    sys.stderr.flush()


def problem_json(problem: Problem) -> dict[str, Any]:
    return {"key": problem.key, "found": problem.found, "expected": problem.expected, "hint": problem.hint,
            "file": problem.file}  # fmt: skip


def print_problems(console: Console, problems: tuple[Problem, ...], file: str | None = None) -> None:
    """Print a list of problems. Their file is not repeated if it is `file`, which the line above the list names."""
    for problem in problems:
        location = f"{problem.file}: " if problem.file and problem.file != file else ""
        console.print(f"{mark(console, ok=False)} {shown(location)}[bold]{escape(short(problem.key))}[/]")
        _print_row(console, Text("    found     "), visible(redact(problem.found)))
        _print_row(console, Text("    expected  "), visible(redact(problem.expected)))
        _print_row(console, Text("    try       "), visible(redact(problem.hint)))


def _print_row(console: Console, head: Text, body: str) -> None:
    """In a file or a pipe each row is one line, whatever its length, so that programs can search it."""
    if console.is_terminal:
        print_wrapped(console, head, body)
    else:
        console.print(head.append(body))


def print_wrapped(console: Console, head: Text, body: str, style: str = "") -> None:
    """Print `head`, and `body` beside it: wrapped to the terminal's width, and indented under its first line."""
    indent = len(head)
    # Words are never broken, so that a command can be copied from a narrow terminal.
    lines = textwrap.wrap(
        body, max(_NARROWEST, console.width - indent), break_long_words=False, break_on_hyphens=False
    ) or [""]
    console.print(head.append(lines[0], style=style), soft_wrap=True)
    for line in lines[1:]:
        console.print(Text(" " * indent).append(line, style=style), soft_wrap=True)


def shown(text: str) -> str:
    """Text from outside, safe to print: without markup, control characters and secrets."""
    return escape(visible(redact(text)))
