"""Resolves what a SimpleTuner config refers to: placeholders, environment variables, and the files it names."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from pathlib import PurePosixPath
from typing import Any

from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.simpletuner.env_names import ENV_NAMES
from gracetune.config.draft import Draft
from gracetune.config.environment import Environment
from gracetune.config.limits import substituted
from gracetune.config.spelling import nearest
from gracetune.config.syntax import Document, read_document
from gracetune.errors import ConfigError


def line(options: PeerBlock, name: str, value: str) -> str:
    """Format an option and its value in the syntax of this file, for a hint."""
    if options.reading.format == "env":
        variable = next((known for known, option in ENV_NAMES.items() if option == name), None)
        return f"{variable}={value}" if variable else f'TRAINER_EXTRA_ARGS+=" --{name}={value}"'
    shown = value if value.isdecimal() else f'"{value}"'
    written = {"TOML": f"{name} = {shown}", "YAML": f"{name}: {shown}"}
    return written.get(options.reading.format, f'"{name}": {shown}')


_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True)
class Placeholders:
    """Substitutes `{env:NAME}` anywhere, and `{model_family}`, `{output_dir}` and `{id}` in datasets.

    Other braces stay as they are.
    """

    environment: Environment
    variables: Mapping[str, str]

    def fill(self, value: Any, draft: Draft, key: str, file: str) -> Any:
        if isinstance(value, str):
            return substituted(_PLACEHOLDER, lambda found: self._one(found, draft, key, file), value)
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


def read_sidecar(options: PeerBlock, name: str, what: str) -> Document | None:
    """Read a file that an option names. Its problems are added to the draft's. Returns None if it is unusable."""
    value = options.take(name)
    if not isinstance(value, str) or not value.strip():
        options.problem(name, f"the path of {what}", f"write the path of {what}")
        return None
    file = find_sidecar(value.strip(), FilePath(options.file))
    if file is None:
        options.problem(name, f"{what}; no such file in the folder of {options.file} or in the working folder",
                        _sidecar_hint(value.strip(), FilePath(options.file)))  # fmt: skip
        return None
    try:
        document = read_document(file)
    except ConfigError as error:
        options.draft.problems += error.problems
        return None
    options.draft.redactor.learn(document.data)
    options.draft.problems += document.problems
    return document


def find_sidecar(value: str, config: FilePath) -> FilePath | None:
    """Find a file relative to the config's folder, the working folder, or the project that has `config/<name>/`."""
    try:
        path = FilePath(value).expanduser()
        folders = [config.parent, FilePath(), *config.absolute().parents[1:3]]
        candidates = [folder / path for folder in folders] + _shipped_examples(value, config)
        return next((file for file in candidates if file.is_file()), None)
    except (OSError, ValueError, RuntimeError):  # a NUL byte, a name that is too long, an unknown user after `~`
        return None


def _shipped_examples(value: str, config: FilePath) -> list[FilePath]:
    """Return where `config/examples/…` can be: next to an example that was copied, or in an installed SimpleTuner."""
    rest = next((value.removeprefix(start) for start in _EXAMPLES if value.startswith(start)), None)
    if rest is None:
        return []
    folders = [config.absolute().parent.parent]
    spec = importlib.util.find_spec("simpletuner")
    if spec is not None and spec.submodule_search_locations:
        folders += [FilePath(root) / "examples" for root in spec.submodule_search_locations]
    return [folder / rest for folder in folders]


_EXAMPLES = ("config/examples/", "simpletuner/examples/")


def _sidecar_hint(value: str, config: FilePath) -> str:
    """Return a hint for a missing file. SimpleTuner's own examples name files that it does not ship."""
    if not value.startswith(_EXAMPLES):
        return "check the spelling, or run from the folder the path starts in"
    wanted = PurePosixPath(value).name
    folder = config.absolute().parent.parent
    try:
        shipped = sorted(path.name for path in folder.glob("*.json") if path.is_file())
    except OSError:
        shipped = []
    alike = _most_alike(wanted, shipped)
    instead = f"; name another, for example {alike}" if alike else ""
    return f"SimpleTuner's examples have no file {wanted}{instead}"


def _most_alike(wanted: str, shipped: list[str]) -> str | None:
    """Return the file with the most words, such as `480p` and `81f`, in common with the name."""
    words = {name: len({*_WORD.findall(name)} & {*_WORD.findall(wanted)}) for name in shipped}
    best = [name for name in shipped if words[name] == max(words.values())]
    return nearest(wanted, best) or next(iter(best), None)


_WORD = re.compile(r"[^\W_]+")
