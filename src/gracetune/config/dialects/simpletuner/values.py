"""SimpleTuner's values: options by name, what argv would have made of them, and the files they point to."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from gracetune.config.dialects.simpletuner.env import ENV_NAMES
from gracetune.config.draft import Draft, Origin, Path
from gracetune.config.environment import Environment
from gracetune.config.plain import plain
from gracetune.config.syntax import Document, read_document
from gracetune.errors import ConfigError

PEER = "SimpleTuner"
Converter = Callable[[Any], Any]


def names(text: str) -> frozenset[str]:
    """A table of names, written as a paragraph."""
    return frozenset(text.split())


@dataclass(frozen=True)
class Options:
    """What a config says, by canonical name, next to the names its writer used. `null` is as good as absent."""

    values: Mapping[str, Any]
    written: Mapping[str, str]
    file: str
    prefix: str = ""
    """What stands before each key when it is named, such as `datasets[0].`"""
    used: set[str] = field(default_factory=set, compare=False)
    """Options that had a say; the others are named in a note, so that none is dropped in silence."""
    format: str = "JSON"
    """The file's syntax, in which hints say what to add."""

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str) -> Any:
        """The value, without having taken it into account."""
        return self.values.get(name)

    def take(self, name: str) -> Any:
        self.used.add(name)
        return self.values.get(name)

    def is_on(self, name: str) -> bool:
        return as_flag(self.values.get(name)) is True

    def switch(self, draft: Draft, name: str) -> bool:
        """Like `is_on`, for switches that leave no value behind in which the schema could find a mistake."""
        value = as_flag(self.values.get(name))
        if value is not None and not isinstance(value, bool):
            self.problem(draft, name, "true or false", "write true or false")
        return value is True

    def key(self, name: str) -> str:
        return f"{self.prefix}{self.written.get(name, name)}"

    def origin(self, name: str) -> Origin:
        self.used.add(name)
        return Origin("file", self.key(name), self.file)

    def put(self, draft: Draft, name: str, path: Path, convert: Converter | None = None) -> None:
        """Carry an option that was given over to a path of the `RunConfig`."""
        if name in self.values:
            value = self.values[name]
            draft.put(path, convert(value) if convert else value, self.origin(name))

    def refuse(self, draft: Draft, name: str, why: str, hint: str = "") -> None:
        draft.refuse(self.key(name), self.take(name), why, hint, self.file)

    def problem(self, draft: Draft, name: str, expected: str, hint: str) -> None:
        draft.problem(self.key(name), self.take(name), expected, hint, self.file)

    def line(self, name: str, value: str) -> str:
        """An option and its value, as they would be written into this file."""
        if self.format == "env":
            variable = next((known for known, option in ENV_NAMES.items() if option == name), None)
            return f"{variable}={value}" if variable else f'TRAINER_EXTRA_ARGS+=" --{name}={value}"'
        shown = value if value.isdecimal() else f'"{value}"'
        return {"TOML": f"{name} = {shown}", "YAML": f"{name}: {shown}"}.get(self.format, f'"{name}": {shown}')

    @classmethod
    def block(cls, value: Mapping[Any, Any], file: str, prefix: str) -> Options:
        """A nested mapping, read in the same way."""
        values = {str(key): item for key, item in value.items() if item is not None}
        return cls(values, {}, file, prefix)


_TRUE = ("1", "true", "yes", "y", "on")
_FALSE = ("0", "false", "no", "n", "off")


def as_flag(value: Any) -> Any:
    """A boolean the way SimpleTuner's parser reads one; anything else stays what it was."""
    if isinstance(value, str):
        text = value.strip().lower()
        return True if text in _TRUE else False if text in _FALSE else value
    return value != 0 if isinstance(value, int | float) and value in (0, 1) else value


def as_number(value: Any) -> Any:
    """`"4"` and `"1e-4"` are numbers on a command line; what does not convert to a finite one stays what it was."""
    if not isinstance(value, str):
        return value
    for convert in (int, float):
        try:
            number = convert(value)
            return number if math.isfinite(number) else value
        except (ValueError, OverflowError):
            continue
    return value


def as_given(value: Any) -> Any:
    return value


def inverse(value: Any) -> Any:
    flag = as_flag(value)
    return not flag if isinstance(flag, bool) else value


def as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def not_zero(value: Any) -> Any:
    """0 switches the thing off."""
    number = as_number(value)
    return None if is_number(number) and number <= 0 else number


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def choice(table: Mapping[str, str]) -> Converter:
    """Another name for the same thing; names that are not in the table stay, for the schema to judge."""
    return lambda value: table.get(value.strip().lower(), value) if isinstance(value, str) else value


def as_list(value: Any) -> Any:
    """A list, a JSON list, or text with commas."""
    value = from_json(value)
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def from_json(value: Any) -> Any:
    """JSON written inside a string, as the options that take structures allow it."""
    if isinstance(value, str) and value.strip()[:1] in ("{", "["):
        try:
            parsed, oddities = plain(json.loads(value))
        except (ValueError, RecursionError):
            return value
        return value if oddities else parsed
    return value


def is_off(value: Any, default: Any = None) -> bool:
    """Whether an option stands at its default, or says in one of the usual ways that it is not wanted."""
    if value is None or value in ("", "None") or _same(value, default):
        return True
    return not default and (as_flag(value) is False or (isinstance(value, str) and value.strip().lower() == "none"))


def _same(value: Any, default: Any) -> bool:
    plain = as_number(value) if is_number(default) else as_flag(value) if isinstance(default, bool) else value
    return isinstance(plain, type(default) if not is_number(default) else int | float) and bool(plain == default)


_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True)
class Placeholders:
    """`{env:NAME}` anywhere, `{model_family}`, `{output_dir}` and `{id}` in datasets; other braces are left alone."""

    environment: Environment
    variables: Mapping[str, str]

    def fill(self, value: Any, draft: Draft, key: str, file: str) -> Any:
        if isinstance(value, str):
            return _PLACEHOLDER.sub(lambda found: self._one(found, draft, key, file), value)
        if isinstance(value, list):
            return [self.fill(item, draft, f"{key}[{index}]", file) for index, item in enumerate(value)]
        if isinstance(value, Mapping):
            return {name: self.fill(item, draft, f"{key}.{name}", file) for name, item in value.items()}
        return value

    def _one(self, found: re.Match[str], draft: Draft, key: str, file: str) -> str:
        if not found[1].startswith("env:"):
            return self.variables.get(found[1], found[0])
        name = found[1].removeprefix("env:")
        text = self.environment.get(name)
        if text is None:
            draft.problem(key, found[0], f"the environment variable {name}, which is not set", f"export {name}=…", file)
        return text or ""


def read_sidecar(draft: Draft, options: Options, name: str, what: str) -> Document | None:
    """A file that an option names. What is wrong with it joins the other problems."""
    value = options.take(name)
    if not isinstance(value, str) or not value.strip():
        options.problem(draft, name, f"the path of {what}", f"write the path of {what}")
        return None
    place = find_sidecar(value.strip(), FilePath(options.file))
    if place is None:
        options.problem(draft, name, f"{what}; no file there, seen from here or from beside {options.file}",
                        "check the spelling, or run from the folder the path starts in")  # fmt: skip
        return None
    try:
        document = read_document(place)
    except ConfigError as error:
        draft.problems += error.problems
        return None
    draft.problems += document.problems
    return document


def find_sidecar(value: str, config: FilePath) -> FilePath | None:
    """As written from the working folder; else from the config's folder, or the project around `config/<name>/`."""
    try:
        path = FilePath(value).expanduser()
        folders = [FilePath(), config.parent, *config.absolute().parents[1:3]]
        candidates = [folder / path for folder in folders] + _shipped_examples(value, config)
        return next((place for place in candidates if place.is_file()), None)
    except (OSError, ValueError, RuntimeError):  # a NUL byte, a name too long, a home that cannot be found
        return None


def _shipped_examples(value: str, config: FilePath) -> list[FilePath]:
    """`config/examples/…` means SimpleTuner's own examples: where one was copied from them, or the installed ones."""
    rest = next((value.removeprefix(start) for start in _EXAMPLES if value.startswith(start)), None)
    if rest is None:
        return []
    folders = [config.absolute().parent.parent]
    spec = importlib.util.find_spec("simpletuner")
    if spec is not None and spec.submodule_search_locations:
        folders += [FilePath(place) / "examples" for place in spec.submodule_search_locations]
    return [folder / rest for folder in folders]


_EXAMPLES = ("config/examples/", "simpletuner/examples/")
