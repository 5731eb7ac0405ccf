"""How commands talk: results on stdout, everything else on stderr, JSON alone when asked for."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from gracetune.config.environment import Environment
from gracetune.errors import ConfigError, GracetuneError, Problem


@dataclass(frozen=True)
class Session:
    """What `main` saw before any command ran: the environment as the user set it."""

    environment: Environment


def session(context: typer.Context) -> Session:
    """The session of this invocation; a fresh one when a command is run outside `main`, as tests do."""
    found = context.find_object(Session)
    return found if found is not None else Session(Environment.capture())


def out() -> Console:
    return Console(highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def say_error(error: GracetuneError) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if isinstance(error, ConfigError):
        print_problems(console, error.problems)
    else:
        console.print(f"[bold red]error[/] {escape(str(error))}")
    sys.stderr.flush()


def print_problems(console: Console, problems: tuple[Problem, ...], file: str | None = None) -> None:
    """`file` is the one already named above the list."""
    for problem in problems:
        where = f"{problem.file}: " if problem.file and problem.file != file else ""
        console.print(f"[bold red]✗[/] {escape(where)}[bold]{escape(problem.key)}[/]")
        console.print(f"    found     {escape(problem.found)}")
        console.print(f"    expected  {escape(problem.expected)}")
        console.print(f"    try       {escape(problem.hint)}")
