"""Tables of a peer's keys, and walking a file along one.

A dialect is a record (`Dialect`): how to recognise a file, tables of every key its program knows, and a function that
goes through them. A key that stands for one value of ours is a `Key` with a path; keys that only mean something
together are read by a `KeyRule`. What happens to each key can be listed without a file (`KeyTable.keys`).
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
    NOTED = "changes nothing about what is learnt: named in a note"
    REJECTED = "would change what is learnt, and is not done here"


class Unless(ABC):
    """When a key that is not done or not used here can be passed over without a word."""

    @abstractmethod
    def holds(self, block: PeerBlock, name: str) -> bool: ...

    def hint(self, name: str) -> str:
        """What to do about it; empty where taking the key out is all there is to say."""
        return ""


@dataclass(frozen=True)
class OneOf(Unless):
    """It has one of the values that ask for nothing."""

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
    """It is false, zero or empty."""

    def holds(self, block: PeerBlock, name: str) -> bool:
        return not block.get(name)


@dataclass(frozen=True)
class Always(Unless):
    """It decides about speed or messages of another program alone."""

    def holds(self, block: PeerBlock, name: str) -> bool:
        return True


UNSET: Any = object()


@dataclass(frozen=True)
class Key:
    """One key of a peer's file, and what is done with it."""

    name: str
    path: Path | None = None
    """Where its value goes, below the root its block is read into. None where a rule reads it."""
    convert: Converter = as_given
    unless: Unless | None = None
    """When the note or the refusal does not apply."""
    note: str = ""
    """What the user is told: the heading under which it is listed, or why it is refused."""
    effect: Effect = Effect.ACTS
    default: Any = UNSET
    """The peer's default, where it differs from ours and changes what is learnt."""
    inherits: bool = False
    """The mapping around this one decides where this one does not have the key."""


def noted(heading: str, names: str, unless: Unless | None = None) -> tuple[Key, ...]:
    """Keys, written as a paragraph, that are listed in a note."""
    return tuple(Key(name, unless=unless, note=heading, effect=Effect.NOTED) for name in names.split())


def rejected(name: str, unless: Unless, why: str) -> Key:
    return Key(name, unless=unless, note=why, effect=Effect.REJECTED)


def read_elsewhere(names: str) -> tuple[Key, ...]:
    """Keys that decide how their mapping is read, before its table is gone through."""
    return tuple(Key(name) for name in names.split())


class KeyRule(Generic[C]):
    """Reads keys that mean something together, or of which one decides about another."""

    def __init__(self, apply: Callable[[PeerBlock, C], None], *keys: str) -> None:
        """Several keys may be written in one text, with spaces."""
        self.apply = apply
        self.keys = tuple(name for text in keys for name in text.split())


class KeyTable(Generic[C]):
    """Every key of one mapping. `C` is what the rules have to know besides the mapping itself."""

    def __init__(self, *entries: Key | KeyRule[C], expected: str = "", otherwise: str = "") -> None:
        """`expected` and `otherwise` are for keys that are unknown: what was expected, in which `{section}` is the name
        of the mapping, and what to do about one that is like none of these."""
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
    """Report keys that are unknown, refuse what is not done here, list what has no effect."""
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
    """Refuse what is not done here and list what has no effect, in the table's order."""
    for name, key in table.keys.items():
        if name in block and key.effect is not Effect.ACTS:
            decline(block, key)


def decline(block: PeerBlock, key: Key) -> None:
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
    """Put what the table's keys say below `root`, and follow its rules, in the table's order."""
    for entry in table.entries:
        if isinstance(entry, KeyRule):
            entry.apply(block, context)
        elif entry.path is not None:
            put_row(block, entry, root)


def put_row(block: PeerBlock, key: Key, root: Path = ()) -> None:
    if key.path is None:
        return
    path = (*root, *key.path)
    source = block.around if key.inherits and key.name not in block and block.around is not None else block
    source.put(key.name, path, key.convert)
    if key.default is not UNSET:
        block.default(path, key.default, key.name)


def supported_block(block: PeerBlock, name: str, table: KeyTable[Any]) -> PeerBlock | None:
    """The mapping below a key, unknown keys in it reported; None where there is none."""
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
    """One program's way to write a config."""

    name: str
    recognises: Callable[[Any], bool]
    """Whether a parsed file is of this dialect."""
    read: Callable[[Document, Draft, Environment], None]
    tables: Mapping[str, KeyTable[Any]] = field(default_factory=dict)
    """Every mapping of such a file by its name."""
    settle: tuple[Callable[[Draft], None], ...] = ()
    """What follows from values that flags may have changed."""
    finds_beside: bool = False
    """What a file names is looked for in its own folder first, then in the working folder."""
    variables_in_text: bool = False
    """`${NAME}` is filled in before a file is parsed, which need not be well-formed until then."""
