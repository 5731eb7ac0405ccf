"""`gracetune`: the command line. Each command's module is imported only when the command is called."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer._click.exceptions import NoSuchOption, UsageError  # base class of `typer.BadParameter`
from typer.core import TyperCommand
from typer.main import get_command
from typer.rich_utils import rich_abort_error, rich_format_error

from gracetune import __version__
from gracetune.cli.command_groups import CommandGroup, suggest_option, with_tidy_help
from gracetune.cli.console import Session, print_json, start, start_bare


@dataclass(frozen=True)
class Entry:
    """A command that may not be imported yet."""

    help: str
    """The first line of its help, repeated here so that `gracetune --help` imports no command."""
    load: Callable[[], typer.Typer | Callable[..., None]]


def _config() -> typer.Typer:
    from gracetune.cli.config import app

    return app


def _data() -> typer.Typer:
    from gracetune.cli.data import app

    return app


def _cache() -> typer.Typer:
    from gracetune.cli.cache import app

    return app


def _adapter() -> typer.Typer:
    from gracetune.cli.adapter import app

    return app


def _family() -> typer.Typer:
    from gracetune.cli.family import app

    return app


def _baseline() -> typer.Typer:
    from gracetune.cli.baseline import app

    return app


def _overlay() -> typer.Typer:
    from gracetune.cli.overlay import app

    return app


def _examples() -> typer.Typer:
    from gracetune.cli.examples import app

    return app


def _bench() -> typer.Typer:
    from gracetune.cli.bench import app
    from gracetune.cli.bench_steps import add_step_benches

    if not any(one.name == "suite" for one in app.registered_commands):
        add_step_benches(app)
    return app


def _init() -> Callable[..., None]:
    from gracetune.cli.init import init

    return init


def _train() -> Callable[..., None]:
    from gracetune.cli.train import train

    return train


def _validate_now() -> Callable[..., None]:
    from gracetune.cli.run_requests import validate_now

    return validate_now


def _save_now() -> Callable[..., None]:
    from gracetune.cli.run_requests import save_now

    return save_now


def _stop() -> Callable[..., None]:
    from gracetune.cli.run_requests import stop

    return stop


def _report() -> Callable[..., None]:
    from gracetune.cli.report import report

    return report


def _studio() -> Callable[..., None]:
    from gracetune.cli.studio import studio

    return studio


def _watch() -> Callable[..., None]:
    from gracetune.cli.studio import watch

    return watch


def _doctor() -> Callable[..., None]:
    from gracetune.cli.doctor import doctor

    return doctor


def _demo() -> Callable[..., None]:
    from gracetune.cli.demo import demo

    return demo


def _estimate() -> Callable[..., None]:
    from gracetune.cli.estimate import estimate

    return estimate


def _completion() -> Callable[..., None]:
    from gracetune.cli.completion import completion

    return completion


ENTRIES = {
    "init": Entry("Write a config for a folder of images, clips or sounds.", _init),
    "train": Entry(
        "Train: stage data, build caches, train, validate, save.",
        _train,
    ),
    "validate-now": Entry("Request a validation from a running job.", _validate_now),
    "save-now": Entry("Request a checkpoint from a running job.", _save_now),
    "stop": Entry("Stop a running job after its current step.", _stop),
    "report": Entry("Write the report of a run: finished, still running, or crashed.", _report),
    "studio": Entry("Show all runs below a folder in a browser.", _studio),
    "watch": Entry("Show one run in a browser.", _watch),
    "doctor": Entry("Examine this machine: GPU, driver, memory mode, limits, versions.", _doctor),
    "demo": Entry(
        "Examine this machine, check the examples, and teach a tiny model a new shape.",
        _demo,
    ),
    "estimate": Entry("Plan the memory of a run before anything is loaded.", _estimate),
    "config": Entry("Check, resolve and describe configuration files.", _config),
    "data": Entry("Look at the data of a run, and caption images.", _data),
    "cache": Entry("Build, check and clear the caches of a run.", _cache),
    "adapter": Entry("Look into adapter files, check them, convert them.", _adapter),
    "family": Entry("Check a model family on its tiny model.", _family),
    "baseline": Entry("Measure what a config costs here, and compare it later.", _baseline),
    "overlay": Entry("Run SimpleTuner or ai-toolkit with features of gracetune.", _overlay),
    "examples": Entry("List the examples, and copy one to start from.", _examples),
    "bench": Entry("Measure a part of gracetune on this machine. Exit 1 if a bar is missed.", _bench),
    "completion": Entry("Print a completion script for bash, zsh or fish.", _completion),
}
MEANT = {
    "start": "train", "run": "train", "finetune": "train", "fine-tune": "train", "launch": "train", "resume": "train",
    "fit": "train", "generate": "validate-now",
    "new": "init", "configure": "init", "setup": "init", "create": "init", "quickstart": "init",
    "sample": "validate-now", "validate": "validate-now", "save": "save-now", "checkpoint": "save-now",
    "cancel": "stop", "kill": "stop", "end": "stop", "check": "config check", "show": "config show",
    "plan": "estimate", "memory": "estimate", "convert": "adapter convert", "inspect": "adapter inspect",
    "pick": "adapter pick", "judge": "data judge", "export": "adapter convert", "monitor": "watch", "status": "watch",
    "dashboard": "studio", "ui": "studio", "web": "studio",
    "example": "examples", "caption": "data caption", "diagnose": "doctor", "benchmark": "bench",
}  # fmt: skip
"""Names from other programs, and the command of ours that they stand for. Used for suggestions."""


class _LazyCommands(MutableMapping[str, Any]):
    """Command name -> click command, imported at its first access."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _command(name, ENTRIES[name].load())
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(ENTRIES)

    def __len__(self) -> int:
        return len(ENTRIES)


def _command(name: str, loaded: typer.Typer | Callable[..., None]) -> Any:
    if isinstance(loaded, typer.Typer):
        command = get_command(loaded)
    else:
        alone = typer.Typer(add_completion=False)
        alone.command(name)(loaded)
        command = get_command(alone)
    command.name = name
    return with_tidy_help(command)


class Commands(CommandGroup):
    """The commands of `ENTRIES`. The list needs only their names and help; a command is imported when it is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        return [*ENTRIES]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in with name and help, for the list of commands. `resolve_command` gives the real command."""
        return TyperCommand(name=cmd_name, help=ENTRIES[cmd_name].help) if cmd_name in ENTRIES else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in ENTRIES:
            return name, self.commands[name], args[1:]
        return super().resolve_command(ctx, args)

    def intended(self, name: str, names: Iterable[str]) -> str | None:
        return MEANT.get(name.lower()) or super().intended(name, names) or _for_path(name)

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        for switch in parameters:
            switch.metavar = ""
        return parameters


def _for_path(name: str) -> str | None:
    """The command for a file or folder that was given without one."""
    path = Path(name)
    if path.is_dir():
        return f"init {shlex.quote(name)}"
    return f"train {shlex.quote(name)}" if path.is_file() else None


app = typer.Typer(
    cls=Commands,
    help="Fine-tune diffusion models on machines whose CPU and GPU memory work as one.",
    epilog="Exit codes: 0 success, 1 an error, 2 wrong usage, 3 interrupted (a run is saved), 141 a closed pipe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its code."""
    given = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in given
    if all(word.startswith("-") for word in given):  # only help or version: no environment is needed
        sys.exit(start_bare(lambda: _invoke(given, None, as_json=as_json), as_json=as_json))
    sys.exit(start(lambda session: _invoke(given, session, as_json=as_json), as_json=as_json))


def _invoke(arguments: list[str], session: Session | None, *, as_json: bool) -> int:
    """Run a command. Returns its exit code. A usage error is printed on stderr, and with --json on stdout too.

    Other errors are raised; `start` and `start_bare` print them.
    """
    try:
        code = app(args=arguments, obj=session, standalone_mode=False)
    except UsageError as error:
        if isinstance(error, NoSuchOption):
            suggest_option(error)
        rich_format_error(error)
        if as_json:
            print_json({"ok": False, "error": error.format_message(), "problems": []})
        return error.exit_code
    except typer.Abort:
        rich_abort_error()
        return 1
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
