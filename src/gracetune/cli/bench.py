"""`gracetune bench NAME`: benchmarks on this machine, compared with required values ("bars").

The JSON result also holds what a later comparison needs: machine, versions, command. Benchmarks of single parts are
here; those of a whole training step are in `bench_steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from gracetune.bench.results import result_of, write_result
from gracetune.bench.row import BenchRow
from gracetune.cli.console import out, print_json
from gracetune.config.environment import make_cublas_deterministic
from gracetune.config.spelling import nearest
from gracetune.errors import ConfigError, Problem
from gracetune.hardware import Machine, probe


# Imported when they run, so that no other command waits for the import of numpy and the decoders.
def _cache(machine: Machine) -> list[BenchRow]:
    from gracetune.bench import cache

    return cache.run(machine)


def _data(machine: Machine) -> list[BenchRow]:
    from gracetune.bench import data

    return data.run(machine)


def _loading(machine: Machine) -> list[BenchRow]:
    from gracetune.bench import loading

    return loading.run(machine)


def _memory(machine: Machine) -> list[BenchRow]:
    from gracetune.bench import memory

    return memory.run(machine)


def _optim(machine: Machine) -> list[BenchRow]:
    from gracetune.bench import optim

    return optim.run(machine)


BENCHES: Final[dict[str, Callable[[Machine], list[BenchRow]]]] = {
    "cache": _cache,
    "data": _data,
    "loading": _loading,
    "memory": _memory,
    "optim": _optim,
}
_HELP: Final = {
    "cache": "Measure reading from caches: loading, iterating, the wait of a step.",
    "data": "Measure scanning, staging and decoding datasets.",
    "loading": "Measure reading weights into the memory they are used from.",
    "memory": "Measure unified memory: links, look-ahead, overflow.",
    "optim": "Measure steps of the optimizers.",
}


class _Benches(TyperGroup):
    """Reports an unknown benchmark as a ConfigError with a suggestion, like any other misspelt name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            meant = nearest(args[0], known) or known[0]
            raise ConfigError([Problem("NAME", args[0], f"one of {', '.join(known)}", f"gracetune bench {meant}")])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Benches,
    help="Measure a part of gracetune on this machine. Exit 1 if a bar is missed.",
    no_args_is_help=True,
    add_completion=False,
)
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the JSON result to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the JSON result and nothing else.")]


def _add(name: str, help_: str) -> None:
    @app.command(name, help=help_)
    def command(output: Output = None, as_json: AsJson = False) -> None:
        make_cublas_deterministic()
        machine = probe()
        rows = BENCHES[name](machine)
        result = result_of(name, rows, machine)
        if output is not None:
            write_result(output, result)
        if as_json:
            print_json(result)
        else:
            print_rows(out(), rows)
        raise typer.Exit(1 if any(row.ok is False for row in rows) else 0)


for _name, _help in _HELP.items():
    _add(_name, _help)


def print_rows(console: Console, rows: list[BenchRow]) -> None:
    marks = {True: "[green]ok  [/]", False: "[bold red]MISS[/]", None: "    "}
    for row in rows:
        value = f"{row.value:.4g} {row.unit}" if row.unit else ""
        bar = f" ({row.bar})" if row.bar else ""
        console.print(f"{marks[row.ok]}  {row.name:<24} {escape(value + bar)}".rstrip())
        if row.detail:
            console.print(f"{'':<31}{escape(row.detail)}", style="dim")
