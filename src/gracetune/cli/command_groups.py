"""Groups of commands: suggestions for an unknown command or option, and help texts that fit any width."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from typer._click.core import Command, Context
from typer._click.exceptions import NoSuchOption
from typer.core import TyperGroup, TyperOption


class CommandGroup(TyperGroup):
    """A group that suggests the intended command for an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, names = args[0], self.list_commands(ctx)
        if name not in names and not name.startswith("-"):
            meant = self.intended(name, names)
            ctx.fail(f"No such command {name!r}. Try: gracetune {self._prefix(ctx)}{meant or '--help'}")
        return super().resolve_command(ctx, args)

    def intended(self, name: str, names: Iterable[str]) -> str | None:
        """The command that an unknown name probably stands for."""
        from gracetune.config.spelling import nearest

        return nearest(name, names)

    def _prefix(self, ctx: Any) -> str:
        return "" if ctx.parent is None else f"{ctx.info_name} "


def with_tidy_help(command: Command) -> Command:
    """Remove `<bool>` and the line breaks inside of paragraphs from the help of a command and of a group's commands."""
    context = Context(command)
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help or "")
    for parameter in command.get_params(context):
        if isinstance(parameter, TyperOption) and parameter.is_flag:
            parameter.metavar = ""
    if isinstance(command, TyperGroup):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                with_tidy_help(inner)
    return command


def suggest_option(error: NoSuchOption) -> None:
    """Give an unknown option better suggestions: `--max-steps` for `--steps`, `--set optimizer.lr=VALUE` for `--lr`.

    Those of typer have `--help` and `--set` for most words. A value of the config is set with `--set` where the command
    has it.
    """
    names = {name for one in error.ctx.command.params for name in one.opts} if error.ctx is not None else set()
    similar = [name for name in error.possibilities or () if name not in ("--help", "--set")]
    error.possibilities = similar or (_settings(error.option_name) if "--set" in names else [])


def _settings(option: str) -> list[str]:
    """`--set` for each value of this name in the config or in one of its sections."""
    from gracetune.config.pydantic_errors import field_names

    name, sections = option.lstrip("-").replace("-", "_").lower(), field_names(())
    keys = [name] * (name in sections) + [f"{one}.{name}" for one in sections if name in field_names((one,))]
    return [f"--set {key}=VALUE" for key in keys]
