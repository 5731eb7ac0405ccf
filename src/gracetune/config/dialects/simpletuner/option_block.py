"""Reads a SimpleTuner file of any format into one block of options.

This resolves names, aliases and placeholders, and reports unknown keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from gracetune.config.dialects.peer_file import PeerBlock, PeerFile
from gracetune.config.dialects.simpletuner.files import ENV_NAMES, FOREIGN_VARIABLES, Placeholders
from gracetune.config.dialects.simpletuner.keys import ALIASES, HARMLESS, PEER, SAMPLES_ONLY, WITHOUT_EFFECT
from gracetune.config.draft import Draft, Origin
from gracetune.config.environment import ALLOCATOR_VARIABLES, Environment, memory_settings
from gracetune.config.memory_options import split_alloc_conf
from gracetune.config.spelling import misspelt, nearest
from gracetune.config.syntax import Document, parse_env
from gracetune.errors import ConfigError, Problem

EXTRA_ARGUMENTS = "TRAINER_EXTRA_ARGS"
Pairs = list[tuple[str, str, Any]]
"""Canonical name, name as written, value."""
MAY_BE_EMPTY = ("resume_from_checkpoint", "validation_negative_prompt", "validation_prompt")
"""Options for which an empty text has a meaning; for all others it counts as absent."""


def collect(document: Document, draft: Draft, environment: Environment, supported: Collection[str]) -> PeerBlock:
    """Return the options of a config by canonical name. A null counts as absent."""
    placeholders = Placeholders(environment, {})
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, key, value in _pairs(document, draft, environment, supported):
        if name not in supported:
            draft.problem(key, value, "an option SimpleTuner knows", misspelt(name, supported, f"remove `{key}`"))
            continue
        canonical = ALIASES.get(name, name)
        if value is None or (value == "" and canonical not in MAY_BE_EMPTY):
            continue
        if canonical in values and values[canonical] != value:
            draft.problem(key, value, f"one value: `{written[canonical]}` says the same thing differently",
                          f"keep one of `{written[canonical]}` and `{key}`")  # fmt: skip
        values[canonical] = placeholders.fill(value, draft, key, document.name)
        written[canonical] = key
    lists: dict[str, list[str]] = {heading: [] for heading in (HARMLESS, SAMPLES_ONLY, WITHOUT_EFFECT)}
    return PeerBlock(PeerFile(PEER, draft, format=document.format, unused=lists), values, written=written)


def _pairs(document: Document, draft: Draft, environment: Environment, supported: Collection[str]) -> Pairs:
    if document.format == "env":
        return _from_env_file(document, draft, environment, supported)
    data = unwrapped(document.data)
    if not isinstance(data, Mapping):
        raise ConfigError([Problem("(file)", "a list of datasets" if isinstance(data, list) else "no mapping",
                                   "a SimpleTuner config: option names and their values",
                                   "give the config.json that names this file in data_backend_config",
                                   document.name)])  # fmt: skip
    return [(bare(key), str(key), value) for key, value in data.items()]


def bare(key: Any) -> str:
    return str(key).strip().lstrip("-")


def unwrapped(data: Any) -> Any:
    """Unwrap a file of the web interface, which saves the config in `config`, next to `_metadata`."""
    if isinstance(data, Mapping) and isinstance(data.get("_metadata"), Mapping) and "config" in data:
        return data["config"]
    return data


def _from_env_file(document: Document, draft: Draft, environment: Environment, supported: Collection[str]) -> Pairs:
    variables = parse_env(document.text, document.name, environment.get)
    taken = _memory_options(variables, draft, document.name)
    pairs: Pairs = []
    left_alone: list[str] = []
    for variable, text in variables.items():
        if variable == EXTRA_ARGUMENTS:
            pairs += _arguments(text, draft)
        elif variable in ENV_NAMES:
            pairs += _setting(variable, text)
        elif variable in taken:
            left_alone += [f"{variable} ({taken[variable]})"] if taken[variable] else []
        elif variable.startswith(FOREIGN_VARIABLES):
            left_alone.append(variable)
        else:
            hint = _env_hint(variable, text, supported)
            draft.problem(variable, text, "a setting SimpleTuner reads from an env file", hint)
    if left_alone:
        draft.note(f"not settings of the run, left to your shell: {', '.join(left_alone)}")
    return pairs


def _env_hint(variable: str, text: str, supported: Collection[str]) -> str:
    if variable.lower() in supported:
        return f'write {EXTRA_ARGUMENTS}="--{variable.lower()}={text}"'
    near = nearest(variable.lower(), [name.lower() for name in ENV_NAMES])
    return f"write {near.upper()}={text}" if near else f"remove {variable}"


def _setting(variable: str, text: str) -> Pairs:
    option, _, fixed = ENV_NAMES[variable].partition("=")
    if fixed:  # a boolean variable that stands for one value of an option
        return [(option, variable, fixed)] if text.strip().lower() == "true" else []
    return [(option, variable, text)]


def _arguments(text: str, draft: Draft) -> Pairs:
    """Parse the variable with extra arguments: `--name=value --switch`."""
    pairs: Pairs = []
    for word in _joined(text.split()):
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            draft.problem(EXTRA_ARGUMENTS, word, "--option or --option=value", f"remove {word}")
            continue
        pairs.append((bare(name), name, value if equals else True))
    return pairs


def _joined(words: Iterable[str]) -> list[str]:
    """Join `--option value` to `--option=value`."""
    joined: list[str] = []
    for word in words:
        if joined and not word.startswith("--") and "=" not in joined[-1]:
            joined[-1] = f"{joined[-1]}={word}"
        else:
            joined.append(word)
    return joined


def _memory_options(variables: Mapping[str, str], draft: Draft, file: str) -> dict[str, str]:
    """Read the memory options that an env file exports, as the GH200 setup script does.

    Returns each variable with such options, and what remains of its value for PyTorch.
    """
    found = memory_settings(Environment(variables))
    draft.problems += [Problem(p.key, p.found, p.expected, p.hint, file) for p in found.problems]
    for name, setting in found.settings.items():
        draft.put(("memory", name), setting.value, Origin("file", setting.variable, file))
    ours = [setting.variable for setting in found.settings.values()] + [problem.key for problem in found.problems]
    rests = {name: split_alloc_conf(variables[name], name) for name in ALLOCATOR_VARIABLES if name in variables}
    taken = {name: split.rest for name, split in rests.items() if split.options or split.problems}
    return {**dict.fromkeys(ours, ""), **taken}
