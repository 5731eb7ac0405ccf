"""Tables of a peer's keys, and the functions that read a file with them.

A dialect is a record (`Dialect`): a function that recognizes a file, tables of every key that its program knows, and a
function that reads a file with them. A key that corresponds to one of our values is a `Key` with a path. Keys that
depend on each other are read by a `KeyRule`. The effect of each key can be listed without a file (`KeyTable.keys`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.values import Converter, as_given, as_number
from gracetune.config.draft import Draft, Path
from gracetune.config.environment import Environment
from gracetune.config.spelling import misspelt
from gracetune.config.syntax import Document

C = TypeVar("C")


class Effect(StrEnum):
    ACTS = "becomes part of the config"
    NOTED = "changes nothing about what is learned: named in a note"
    REJECTED = "would change what is learned, and is not done here"


class Unless(ABC):
    """The condition under which an unsupported or unused key is ignored without a message."""

    @abstractmethod
    def holds(self, block: PeerBlock, name: str) -> bool: ...

    def hint(self, name: str) -> str:
        """Return what to type; empty if the only remedy is to remove the key."""
        return ""


@dataclass(frozen=True)
class OneOf(Unless):
    """Holds if the key is absent, or has one of the values without an effect."""

    values: tuple[Any, ...]

    def holds(self, block: PeerBlock, name: str) -> bool:
        value = block.get(name)
        return value is None or any(as_number(value) == harmless for harmless in self.values)

    def hint(self, name: str) -> str:
        plain = self.values[0]
        quiet = f"write `{name}: {json.dumps(plain)}`" if plain is not None else f"remove `{name}`"
        return f"{quiet}, or train without it: --allow-unsupported"


@dataclass(frozen=True)
class IsFalse(Unless):
    """Holds if the value is false, zero, empty or absent."""

    def holds(self, block: PeerBlock, name: str) -> bool:
        return not block.get(name)


@dataclass(frozen=True)
class Always(Unless):
    """Always holds, for keys that only affect the speed or the messages of another program."""

    def holds(self, block: PeerBlock, name: str) -> bool:
        return True


UNSET: Any = object()


@dataclass(frozen=True)
class Key:
    """One key of a peer's file, and its effect."""

    name: str
    path: Path | None = None
    """The path of its value in a `RunConfig`, relative to the root of its block. None if a rule reads the key."""
    convert: Converter = as_given
    unless: Unless | None = None
    """When the note or the rejection does not apply."""
    note: str = ""
    """The heading of the note that lists it, or why it is rejected."""
    effect: Effect = Effect.ACTS
    default: Any = UNSET
    """The peer's default, if it differs from ours and changes what is learned."""
    inherits: bool = False
    """Whether a missing key is read from the mapping around this one."""


def noted(heading: str, names: str, *, unless: Unless | None = None) -> tuple[Key, ...]:
    """Return keys that are listed in a note, unless they have a value without effect. `names` is separated by white
    space."""
    return tuple(Key(name, unless=unless, note=heading, effect=Effect.NOTED) for name in names.split())


def rejected(name: str, unless: Unless, why: str) -> Key:
    """Return an unsupported key. Its value is rejected unless `unless` holds: such values have no effect.

    `why` is the expected value and, if that explains nothing, a reason.
    """
    return Key(name, unless=unless, note=why, effect=Effect.REJECTED)


def read_elsewhere(names: str) -> tuple[Key, ...]:
    """Return keys that code reads before the table of their mapping is applied."""
    return tuple(Key(name) for name in names.split())


class KeyRule(Generic[C]):
    """A function that reads several keys which depend on each other.

    It is called once for each mapping, even for one without the keys, because it may put a default.
    """

    def __init__(self, apply: Callable[[PeerBlock, C], None], *keys: str) -> None:
        """Each of `keys` can be several names, separated by white space."""
        self.apply = apply
        self.keys = tuple(name for text in keys for name in text.split())


class KeyTable(Generic[C]):
    """Every key of one mapping. `C` is the type of the context that its rules need besides the mapping."""

    def __init__(self, *entries: Key | KeyRule[C], expected: str = "", otherwise: str = "") -> None:
        """`expected` and `otherwise` are for messages on unknown keys: what was expected, with `{section}` for the name
        of the mapping, and the hint if no known key is similar."""
        own = Counter(entry.name for entry in entries if isinstance(entry, Key))
        twice = sorted(name for name, count in own.items() if count > 1)
        if twice:
            raise ValueError(f"in the table twice: {', '.join(twice)}")
        self.entries = entries
        self.keys: Mapping[str, Key] = {
            key.name: key
            for entry in entries
            for key in ([entry] if isinstance(entry, Key) else [Key(name) for name in entry.keys if name not in own])
        }
        self.expected = expected or f"one of {', '.join(self.keys)}"
        self.otherwise = otherwise

    def __contains__(self, name: object) -> bool:
        return name in self.keys

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)

    def names(self, effect: Effect) -> list[str]:
        return [name for name, key in self.keys.items() if key.effect is effect]


def check(block: PeerBlock, table: KeyTable[Any]) -> None:
    """Report unknown keys, reject unsupported ones, and list those without an effect."""
    for name in block.values:
        key = table.keys.get(name)
        if key is None:
            report_unknown(block, name, table)
        elif key.effect is not Effect.ACTS:
            decline(block, key)


def report_unknown_keys(block: PeerBlock, table: KeyTable[Any]) -> None:
    for name in block.values:
        if name not in table:
            report_unknown(block, name, table)


def decline_keys(block: PeerBlock, table: KeyTable[Any]) -> None:
    """Reject unsupported keys and list those without an effect, in the table's order."""
    for name, key in table.keys.items():
        if name in block and key.effect is not Effect.ACTS:
            decline(block, key)


def decline(block: PeerBlock, key: Key) -> None:
    """Reject an unsupported key, or list one without an effect in a note. Does nothing if its `unless` holds."""
    if key.unless is not None and key.unless.holds(block, key.name):
        return
    if key.effect is Effect.NOTED:
        block.list_unused(key.note, key.name)
    else:
        block.reject(key.name, key.note, key.unless.hint(key.name) if key.unless is not None else "")


def report_unknown(block: PeerBlock, name: str, table: KeyTable[Any]) -> None:
    section = block.key_path.rpartition(".")[2].partition("[")[0] or "the file"
    home = next((home for home, keys in block.reading.homes.items() if name in keys and keys is not table), None)
    hint = f"move it to `{home}`" if home is not None else misspelt(name, table, table.otherwise)
    block.problem(name, table.expected.format(section=section), hint)


def apply(block: PeerBlock, table: KeyTable[C], context: C, root: Path = ()) -> None:
    """Put the values of the table's keys below `root` and apply its rules, in the table's order."""
    for entry in table.entries:
        if isinstance(entry, KeyRule):
            entry.apply(block, context)
        elif entry.path is not None:
            put_row(block, entry, root)


def put_row(block: PeerBlock, key: Key, root: Path = ()) -> None:
    """Put the value of one key below `root`, or else the peer's default, if the key has one."""
    if key.path is None:
        return
    path = (*root, *key.path)
    source = block.around if key.inherits and key.name not in block and block.around is not None else block
    source.put(key.name, path, key.convert)
    if key.default is not UNSET:
        block.default(path, key.default, key.name)


def supported_block(block: PeerBlock, name: str, table: KeyTable[Any]) -> PeerBlock | None:
    """Return the mapping under a key, after reporting its unknown keys; None if there is none."""
    value = block.take(name)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        block.problem(name, f"a mapping with {', '.join([*table][:3])}, …", f'write "{name}": {{…}}')
        return None
    inner = block.without_nulls(value, block.key(name))
    report_unknown_keys(inner, table)
    return inner


@dataclass(frozen=True)
class Dialect:
    """The configuration format of one program."""

    name: str
    recognizes: Callable[[Any], bool]
    """Whether a parsed file is of this dialect."""
    read: Callable[[Document, Draft, Environment], None]
    """Fills the draft with values and problems. Raises ConfigError if the rest of the file cannot be read."""
    tables: Mapping[str, KeyTable[Any]] = field(default_factory=dict)
    """Name of a mapping in such a file -> its table."""
    settle: tuple[Callable[[Draft], None], ...] = ()
    """Functions that run after flags, for decisions that depend on values a flag can change."""
    finds_beside: bool = False
    """Whether relative paths are looked up in the file's own folder first, then in the working folder."""
    variables_in_text: bool = False
    """Whether `${NAME}` is substituted before a file is parsed. It can be malformed until then."""
