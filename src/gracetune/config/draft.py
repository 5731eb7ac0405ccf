"""`Draft`: the values that readers collect for a `RunConfig`, each with its origin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from gracetune.config.limits import MOST_PROBLEMS
from gracetune.errors import ConfigError, Problem, visible
from gracetune.redaction import HIDDEN, Redactor, redact_values

Path = tuple[str | int, ...]
Kind = Literal["file", "flag", "environment", "default"]


@dataclass(frozen=True)
class Origin:
    """Where a value came from: a file, a flag, the environment or a default."""

    kind: Kind
    key: str = ""
    """The key as the user wrote it, which can differ from gracetune's own name."""
    location: str = ""
    """The file that has the value. For a default, the program whose default it is."""

    def __str__(self) -> str:
        return " ".join(part for part in (self.kind, self.location, self.key) if part)


OUR_DEFAULT = Origin("default")


def too_many_problems(file: str | None) -> Problem:
    hint = "check that this is the right file, fix what is listed, and check it again"
    return Problem("(file)", f"more than {MOST_PROBLEMS} problems", "a configuration of one dialect", hint, file)


class UnquotedText(str):
    """Our own description of what was found. Messages show it without the quotes that a user's text gets."""

    __slots__ = ()


def dotted(path: Path) -> str:
    """`("datasets", 0, "path")` -> `datasets[0].path`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


_STEP = re.compile(r"\[(\d+)\]|\[([^\[\]=]+)\]|\.?([^.\[\]=]+)")


def parse_path(text: str) -> Path:
    """The inverse of `dotted`. Also accepts `datasets.0.path` and `datasets[NAME].path`. Else raises ValueError."""
    steps: list[str | int] = []
    position = 0
    while position < len(text):
        match = _STEP.match(text, position)
        if match is None or (position == 0 and text[0] in ".["):
            raise ValueError(f"not a key path: {text!r}")
        index = match[1] or (match[3] if match[3] and match[3].isdecimal() and steps else None)
        steps.append(int(index) if index else match[2] or match[3])
        position = match.end()
    if not steps:
        raise ValueError("an empty key path")
    return tuple(steps)


@dataclass
class Draft:
    """Collects the values of files, environment and flags. A later `put` replaces an earlier one."""

    file: str
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unsupported: list[Problem] = field(default_factory=list)
    """What `reject` was called with: errors or, with `--allow-unsupported`, notes."""
    notes: list[str] = field(default_factory=list)
    reported_missing: set[Path] = field(default_factory=set)
    """Required values that a reader has already reported missing, under the dialect's own name."""
    unread: set[Path] = field(default_factory=set)
    """Paths of placeholder values. The reader has already reported why, so no rule is checked against them."""
    entries: list[tuple[int, ...]] | None = None
    """The indices of the datasets that each entry of the file's own list became; None if each became one."""
    rejected: set[Path] = field(default_factory=set)
    """Values that a rejected key would have set. They count as missing only with `--allow-unsupported`."""
    redactor: Redactor = field(default_factory=Redactor)
    """Has the secrets of every file that was read."""

    def put(self, path: Path, value: Any, origin: Origin) -> None:
        if isinstance(self.get(path), dict | list):
            self._forget_below(path)
        _insert(self.tree, path, value)
        self.origins[path] = origin

    def put_tree(self, path: Path, value: Any, origin: Origin) -> None:
        """Put every leaf of a nested value, each under its own key."""
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                self.put_tree((*path, str(key)), item, _below(origin, str(key)))
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                self.put_tree((*path, index), item, _below(origin, index))
        elif value != {} or self.get(path) is None:  # an empty section says nothing about what is already in it
            self.put(path, value, origin)

    def default(self, path: Path, value: Any, whose: str, key: str = "") -> None:
        """Put a peer's default that differs from ours, unless the path has a value, or is inside of one.

        `checkpoints: 100` is such a value. It is invalid, and a default of `checkpoints.format` must not hide it.
        """
        around = (self.get(path[:length]) for length in range(1, len(path)))
        if path not in self.origins and all(one is None or isinstance(one, dict | list) for one in around):
            self.put(path, value, Origin("default", key, whose))

    def get(self, path: Path) -> Any:
        """Return the value at a path, or None."""
        node: Any = self.tree
        for step in path:
            if isinstance(node, dict):
                node = node.get(str(step))
            elif isinstance(node, list) and isinstance(step, int) and step < len(node):
                node = node[step]
            else:
                return None
        return node

    def origin(self, path: Path) -> Origin | None:
        """Return the origin of a value, or else of the nearest value that contains it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return None

    def written_key(self, path: Path) -> tuple[str, str | None]:
        """Return the key and file to report for the value at a path. The file is None for flags and variables."""
        for length in range(len(path), 0, -1):
            origin = self.origins.get(path[:length])
            if origin is not None and origin.key:
                inside = dotted(path[length:])
                key = f"{origin.key}.{inside}" if inside and not inside.startswith("[") else f"{origin.key}{inside}"
                return key, (self.file if origin.kind == "default" else origin.location or None)
            if origin is not None:
                break
        return dotted(path), self.file

    def dataset_address(self, index: int) -> str:
        """Return the name of a dataset in `--set`, such as `datasets[0]`."""
        if self.entries is None:
            return f"datasets[{index}]"
        entry = next((number for number, made in enumerate(self.entries) if index in made), None)
        return f"datasets[{self.get(('datasets', index, 'id'))}]" if entry is None else f"datasets[{entry}]"

    def missing(self, path: Path, key: str, expected: str, hint: str) -> None:
        """Report a required key that the file lacks, under its dialect's name."""
        self.reported_missing.add(path)
        self.problems.append(Problem(key, "nothing", expected, hint, self.file))

    def problem(self, key: str, found: Any, expected: str, hint: str, file: str | None = None) -> None:
        # A file can have an empty key, and a problem has to show it.
        self.problems.append(problem_with(key or '""', found, expected, hint, file or self.file))
        self._stop_at_too_many()

    def reject(self, key: str, found: Any, why: str, hint: str = "", file: str | None = None) -> None:
        """Report a known key that would change the result but is not supported. `--allow-unsupported` ignores it.

        `why` is the expected value and, if that explains nothing, a reason.
        """
        hint = hint or f"remove `{key}`, or train without it: --allow-unsupported"
        self.unsupported.append(problem_with(key, found, why, hint, file or self.file))
        self._stop_at_too_many()

    def _stop_at_too_many(self) -> None:
        """Raise once there are too many problems: each can cost a search for the nearest name."""
        if len(self.problems) + len(self.unsupported) > MOST_PROBLEMS:
            raise ConfigError([*self.unsupported, too_many_problems(self.file)])

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _forget_below(self, path: Path) -> None:
        for known in [known for known in self.origins if len(known) > len(path) and known[: len(path)] == path]:
            del self.origins[known]


def _below(origin: Origin, step: str | int) -> Origin:
    key = f"{origin.key}[{step}]" if isinstance(step, int) else f"{origin.key}.{step}".removeprefix(".")
    return Origin(origin.kind, key, origin.location)


def _insert(tree: dict[str, Any], path: Path, value: Any) -> None:
    node: Any = tree
    for step, following in pairwise(path):
        node = _child(node, step, [] if isinstance(following, int) else {})
    last = path[-1]
    if isinstance(node, list) and isinstance(last, int):
        node.extend([None] * (last + 1 - len(node)))
        node[last] = value
    else:
        node[last if isinstance(node, dict) else str(last)] = value


def _child(node: Any, step: str | int, empty: dict[str, Any] | list[Any]) -> Any:
    if isinstance(node, list) and isinstance(step, int):
        node.extend([None] * (step + 1 - len(node)))
        if not isinstance(node[step], type(empty)):
            node[step] = empty
        return node[step]
    child = node.get(step)
    if not isinstance(child, type(empty)):
        child = node[step] = empty
    return child


def problem_with(
    key: str, found: Any, expected: str, hint: str, file: str | None = None, *, sentence: str = "{}"
) -> Problem:
    """Build a problem about a value. The value is hidden if the key's name says that it is a secret.

    `sentence` describes the value, which replaces the `{}` in it.
    """
    words = describe(found, key)
    if words == HIDDEN:  # a hint may repeat what was written
        hint = re.sub(rf"(?<!\w){re.escape(str(found).strip())}(?!\w)", lambda _: HIDDEN, hint)
    return Problem(key, sentence.format(words), expected, hint, file)


def describe(value: Any, key: str = "") -> str:
    """Describe a value as its writer would recognize it; lists and mappings by their type and length.

    `key` is the name it was found under. A value whose key names a secret is hidden.
    """
    if isinstance(value, UnquotedText):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing (null)"
    if isinstance(value, Mapping):
        return f"a mapping with {len(value)} keys" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    shown = redact_values(value, key)  # before it is shortened: a truncated secret would not be recognized
    text = f'"{visible(shown)}"' if isinstance(shown, str) and shown != HIDDEN else str(shown)
    return text if len(text) <= 80 else f"{text[:77]}..."
