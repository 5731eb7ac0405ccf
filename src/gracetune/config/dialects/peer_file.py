"""One mapping of a peer's file: its values by name, and their way into a draft."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gracetune.config.dialects.values import Converter, as_flag
from gracetune.config.draft import Draft, Origin, Path

_OWN: Any = object()


@dataclass(frozen=True)
class PeerFile:
    """One file of a peer, on its way into a draft."""

    peer: str
    """Whose file it is, and so whose defaults are taken."""
    draft: Draft
    root: str = ""
    """Left out where keys are only listed, such as `config.process[0].`"""
    format: str = "JSON"
    """The file's syntax, in which hints say what to add."""
    homes: Mapping[str, Container[str]] = field(default_factory=dict)
    """Every section's keys by its name, to say where a misplaced key belongs."""
    unused: dict[str, list[str]] = field(default_factory=dict, compare=False)
    """Keys without an effect, listed in one note for each heading."""

    def note_unused(self) -> None:
        for heading, keys in self.unused.items():
            if keys:
                self.draft.note(f"{heading}: {', '.join(dict.fromkeys(keys))}")


@dataclass(frozen=True)
class PeerBlock:
    """What a mapping says, next to the names its writer used. A null counts as not written."""

    reading: PeerFile
    values: Mapping[str, Any]
    key_path: str = ""
    """Where in the file it stands, such as `datasets[0]`; empty at the top."""
    written: Mapping[str, str] = field(default_factory=dict)
    """The whole key of values that are written elsewhere or under another name."""
    elsewhere: str = ""
    """The file it stands in, where that is not the config itself."""
    around: PeerBlock | None = None
    """The mapping that decides where this one does not have a key that it inherits."""
    used: set[str] = field(default_factory=set, compare=False)
    """Keys that had a say. The others can be named in a note, so that none is dropped in silence."""

    @property
    def draft(self) -> Draft:
        return self.reading.draft

    @property
    def file(self) -> str:
        return self.elsewhere or self.draft.file

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str) -> Any:
        """The value, without having taken it into account."""
        return self.values.get(name)

    def take(self, name: str) -> Any:
        self.used.add(name)
        return self.values.get(name)

    def key(self, name: str) -> str:
        return self.written.get(name) or (f"{self.key_path}.{name}" if self.key_path else name)

    def origin(self, name: str) -> Origin:
        self.used.add(name)
        return Origin("file", self.key(name), self.file)

    def put(self, name: str, path: Path, convert: Converter | None = None) -> None:
        """Carry a value that was given over to a path of the `RunConfig`."""
        value = self.values.get(name)
        if value is not None:
            self.assign(path, convert(value) if convert else value, name)

    def assign(self, path: Path, value: Any, name: str) -> None:
        """Put a value that follows from a key."""
        self.draft.put(path, value, self.origin(name))

    def default(self, path: Path, value: Any, key: str = "") -> None:
        """The peer's default, where it differs from ours and the file does not set it."""
        self.draft.default(path, value, self.reading.peer, key)

    def note(self, text: str) -> None:
        self.draft.note(text)

    def list_unused(self, heading: str, *names: str) -> None:
        """Name keys in the note with this heading."""
        keys = [self.key(name).removeprefix(self.reading.root) for name in names]
        if keys:
            self.reading.unused.setdefault(heading, []).extend(keys)

    def reject(self, name: str, why: str, hint: str = "", *, found: Any = _OWN) -> None:
        value = self.take(name)
        self.draft.reject(self.key(name), value if found is _OWN else found, why, hint, self.file)

    def problem(self, name: str, expected: str, hint: str, *, found: Any = _OWN) -> None:
        value = self.take(name)
        self.draft.problem(self.key(name), value if found is _OWN else found, expected, hint, self.file)

    def has_problem(self, *names: str) -> bool:
        keys = {self.key(name) for name in names}
        return any(problem.key in keys for problem in self.draft.problems)

    def flag(self, name: str, default: bool) -> bool:
        """True or false, and nothing else: any other value is a problem and counts as the default."""
        value = self.get(name)
        if isinstance(value, bool):
            return value
        if value is not None and not self.has_problem(name):
            self.problem(name, "true or false", f"write `{name}: {str(default).lower()}`")
        return default

    def is_on(self, name: str) -> bool:
        """Whether a switch is on, in any of the spellings a command line takes."""
        return as_flag(self.values.get(name)) is True

    def switch(self, name: str) -> bool:
        """Like `is_on`, for switches that leave no value behind in which the schema could find a mistake."""
        value = as_flag(self.values.get(name))
        if value is not None and not isinstance(value, bool):
            self.problem(name, "true or false", "write true or false")
        return value is True

    def inner(self, name: str) -> PeerBlock:
        """The mapping below a key; an empty one where there is none."""
        return block_at(self.reading, self.get(name), self.key(name))

    def without_nulls(self, value: Mapping[Any, Any], key_path: str) -> PeerBlock:
        """A mapping of the same file that is no section of the peer's, without the keys that are null."""
        values = {str(key): item for key, item in value.items() if item is not None}
        return PeerBlock(replace(self.reading, homes={}), values, key_path, elsewhere=self.elsewhere)


def block_at(reading: PeerFile, value: Any, key_path: str) -> PeerBlock:
    """The mapping at a place of the config; anything else there is a problem, and an empty mapping."""
    if value is not None and not isinstance(value, Mapping):
        reading.draft.problem(key_path, value, "a mapping", "indent its keys below it")
    values = {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}
    return PeerBlock(reading, values, key_path)
