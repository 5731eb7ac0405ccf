"""`gracetune completion SHELL`: a completion script with all commands and options, made from their definitions.

The script contains all names, so completing does not start Python.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer
from typer._click.core import Command, Context
from typer.core import TyperGroup, TyperOption


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@dataclass(frozen=True)
class CompletedOption:
    """An option as a shell completes it."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True)
class CompletedCommand:
    """A command as a shell completes it."""

    path: str
    """`/config/check` for `gracetune config check`; empty for `gracetune` itself."""
    commands: tuple[tuple[str, str], ...]
    """Name and help of each command of a group."""
    options: tuple[CompletedOption, ...]


def completion(
    context: typer.Context,
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print a completion script for bash, zsh or fish."""
    found = [*_commands(context.find_root().command, "")]
    print(_SCRIPTS[shell](found))


def _commands(command: Command, path: str) -> Iterator[CompletedCommand]:
    context = Context(command)
    inner = _subcommands(command, context)
    yield CompletedCommand(
        path,
        tuple((name, _first_sentence(one.help)) for name, one in inner.items()),
        tuple(_option(one) for one in command.get_params(context) if isinstance(one, TyperOption) and not one.hidden),
    )
    for name, one in inner.items():
        yield from _commands(one, f"{path}/{name}")


def _subcommands(command: Command, context: Context) -> dict[str, Command]:
    """The commands of a group. They are taken from `commands`, which has the whole command and not only its name."""
    if not isinstance(command, TyperGroup):
        return {}
    return {name: command.commands[name] for name in command.list_commands(context)}


def _option(option: TyperOption) -> CompletedOption:
    choices = option.type_descriptor.choices if option.type_descriptor.is_choice else ()
    names = (*option.opts, *option.secondary_opts)
    return CompletedOption(names, _first_sentence(option.help), not option.is_flag, tuple(map(str, choices or ())))


def _first_sentence(help_text: str | None) -> str:
    """The first sentence, without what a shell would interpret."""
    line = (help_text or "").strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    return "".join(letter for letter in line if letter.isprintable() and letter not in "'\"`\\$[]")


def _value_options(found: list[CompletedCommand]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """`path:option` for each option with a value, and the values that it allows; none if it is any text or file."""
    for command in found:
        for option in command.options:
            if option.takes_value:
                for name in option.names:
                    yield f"{command.path}:{name}", option.choices


def _cases(found: list[CompletedCommand], with_choices: str, files: str) -> Iterator[str]:
    """Cases of a shell's `case`, for the word that follows an option with a value."""
    anything = []
    for key, choices in _value_options(found):
        if choices:
            yield f"        {key}) {with_choices.format(' '.join(map(shlex.quote, choices)))}; return ;;"
        else:
            anything.append(key)
    yield f"        {'|'.join(anything)}) {files}; return ;;"


def _paths(found: list[CompletedCommand], separator: str) -> str:
    return separator.join(command.path for command in found if command.path)


def _bash(found: list[CompletedCommand]) -> str:
    words = []
    for command in found:
        names = [name for name, _ in command.commands]
        options = [name for option in command.options for name in option.names]
        words.append(f"        '{command.path}') commands='{' '.join(names)}' options='{' '.join(options)}' ;;")
    lines = [
        "# gracetune completion bash > ~/.local/share/bash-completion/completions/gracetune",
        "_gracetune() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" path=',
        "    local word commands= options=",
        '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        f'        case "$path/$word" in {_paths(found, "|")}) path="$path/$word" ;; esac',
        "    done",
        "    COMPREPLY=()",
        '    case "$path:$previous" in',
        *_cases(found, 'COMPREPLY=($(compgen -W "{}" -- "$current"))', ":"),
        "    esac",
        '    case "$path" in',
        *words,
        "    esac",
        '    if [[ $current == -* ]]; then commands="$options"; fi',
        '    COMPREPLY=($(compgen -W "$commands" -- "$current"))',
        "}",
        "complete -o default -F _gracetune gracetune  # complete files if nothing else matches",
    ]
    return "\n".join(lines)


def _zsh(found: list[CompletedCommand]) -> str:
    words = []
    for command in found:
        names = [f"'{name}:{text}'" for name, text in command.commands]
        options = [f"'{name}:{option.help}'" for option in command.options for name in option.names]
        words.append(f"        ('{command.path}') commands=({' '.join(names)}) options=({' '.join(options)}) ;;")
    lines = [
        "#compdef gracetune",
        "# gracetune completion zsh > ~/.zfunc/_gracetune, with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc",
        "_gracetune() {",
        "    local at= word",
        "    local -a commands options",
        '    for word in "${(@)words[2,CURRENT-1]}"; do',
        f'        case "$at/$word" in ({_paths(found, "|")}) at="$at/$word" ;; esac',
        "    done",
        '    case "$at:${words[CURRENT-1]}" in',
        *_cases(found, "compadd -- {}", "_files"),
        "    esac",
        '    case "$at" in',
        *words,
        "    esac",
        '    if [[ "${words[CURRENT]}" == -* ]]; then _describe -o option options',
        "    elif (( $#commands )); then _describe command commands",
        "    else _files; fi",
        "}",
        'if [ "$funcstack[1]" = _gracetune ]; then _gracetune "$@"; else compdef _gracetune gracetune; fi',
    ]
    return "\n".join(lines)


def _fish(found: list[CompletedCommand]) -> str:
    lines = [
        "# gracetune completion fish > ~/.config/fish/completions/gracetune.fish",
        "function __gracetune_at",
        "    set -l at ''",
        "    for word in (commandline -opc)[2..-1]",
        '        switch "$at/$word"',
        f"            case {_paths(found, ' ')}",
        '                set at "$at/$word"',
        "        end",
        "    end",
        '    test "$at" = "$argv[1]"',
        "end",
    ]
    for command in found:
        prefix = f"complete -c gracetune -n \"__gracetune_at '{command.path}'\""
        lines += [f"{prefix} -f -a {name} -d '{text}'" for name, text in command.commands]
        for option in command.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = f" -x -a '{' '.join(option.choices)}'" if option.choices else " -r" if option.takes_value else ""
            lines.append(f"{prefix} {names}{value} -d '{option.help}'")
    return "\n".join(lines)


_SCRIPTS: dict[Shell, Callable[[list[CompletedCommand]], str]] = {
    Shell.BASH: _bash, Shell.ZSH: _zsh, Shell.FISH: _fish,
}  # fmt: skip
