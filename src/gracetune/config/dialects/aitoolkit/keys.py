"""What every part of the ai-toolkit reader shares: a block of the file, a table of its keys, and going through both."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gracetune.config.draft import Draft, Origin, Path
from gracetune.config.spelling import misspelt

PEER = "ai-toolkit"


class Known(Enum):
    """Keys that need no converter."""

    HARMLESS = "changes nothing about the trained weights; named in one note"
    BY_HAND = "read together with other keys"


@dataclass(frozen=True)
class Put:
    """The value goes to one place of the `RunConfig`, below the root the block is read into."""

    path: Path
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Refused:
    """Would change the result and is not done here, unless the value asks for nothing."""

    why: str
    unless: tuple[Any, ...] = (False,)

    def asks_for_nothing(self, value: Any) -> bool:
        return value is None or any(number(value) == harmless for harmless in self.unless)

    def hint(self, name: str) -> str:
        plain = self.unless[0]
        quiet = f"write `{name}: {json.dumps(plain)}`" if plain is not None else f"remove `{name}`"
        return f"{quiet}, or train without it: --allow-unsupported"


Row = Put | Refused | Known
Table = Mapping[str, Row]


def refused_unless(default: Any, why: str) -> Refused:
    return Refused(why, (default,))


def number(value: Any) -> Any:
    """A number written as text becomes a number; everything else stays what it is."""
    if not isinstance(value, str):
        return value
    try:
        found = float(value)
    except ValueError:
        return value
    if not math.isfinite(found):
        return value
    return int(value) if value.strip().lstrip("+-").isdecimal() else found


def whole(value: Any) -> int | None:
    """The value if it is a whole number, and None for anything else (true is no number)."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def real(value: Any) -> float | None:
    """The value as a finite float, and None for anything that is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def precision(value: Any) -> Any:
    """ai-toolkit's names for a number format, as ours."""
    names = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
    return names.get(value, value) if isinstance(value, str) else value


@dataclass
class Reading:
    """One job on its way into a draft."""

    draft: Draft
    file: str
    harmless: list[str] = field(default_factory=list)
    tables: Mapping[str, Table] = field(default_factory=dict)
    """Every section's keys by its name, to say where a misplaced key belongs."""
    batches_per_step: int = 1
    """Above 1 where the file counts micro-batches (`gradient_accumulation_steps`) and we count optimizer steps."""

    def put(self, path: Path, value: Any, key: str) -> None:
        self.draft.put(path, value, Origin("file", key, self.file))

    def default(self, path: Path, value: Any) -> None:
        self.draft.default(path, value, PEER)

    def said(self, *keys: str) -> bool:
        """Whether one of the keys already has a problem."""
        return any(problem.key in keys for problem in self.draft.problems)

    def put_count(self, path: Path, value: Any, key: str) -> None:
        """A number of the file's steps, as optimizer steps."""
        count = whole(number(value))
        if count is not None and count > 0 and self.batches_per_step > 1:
            value = -(-count // self.batches_per_step)
        self.put(path, number(value), key)


@dataclass(frozen=True)
class Block:
    """One mapping of the file. A null counts as not written, as it mostly does upstream."""

    values: Mapping[str, Any]
    prefix: str
    written_as: Mapping[str, str] = field(default_factory=dict)
    """The user's own key of values that stand elsewhere in the file."""

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def key(self, name: str) -> str:
        return self.written_as.get(name) or (f"{self.prefix}.{name}" if self.prefix else name)

    def flag(self, reading: Reading, name: str, default: bool) -> bool:
        """True or false; anything else is a problem and counts as the default."""
        value = self.get(name)
        if isinstance(value, bool):
            return value
        if value is not None and not reading.said(self.key(name)):
            reading.draft.problem(self.key(name), value, "true or false", f"write `{name}: {str(default).lower()}`")
        return default


def block_of(reading: Reading, value: Any, prefix: str) -> Block:
    if value is None:
        return Block({}, prefix)
    if not isinstance(value, Mapping):
        reading.draft.problem(prefix, value, "a mapping", "indent its keys below it")
        return Block({}, prefix)
    return Block({str(key): item for key, item in value.items()}, prefix)


def check(reading: Reading, block: Block, table: Table) -> None:
    """Name what is unknown, refuse what is not done here, remember what is harmless."""
    for name, value in block.values.items():
        row = table.get(name)
        if row is None:
            _unknown(reading, block, name, table)
        elif row is Known.HARMLESS and value:
            reading.harmless.append(block.key(name))
        elif isinstance(row, Refused) and not row.asks_for_nothing(value):
            reading.draft.refuse(block.key(name), value, row.why, row.hint(name))


def put_rows(reading: Reading, block: Block, table: Table, root: Path = ()) -> None:
    for name, row in table.items():
        value = block.get(name)
        if isinstance(row, Put) and value is not None:
            reading.put((*root, *row.path), row.convert(value), block.key(name))


def _unknown(reading: Reading, block: Block, name: str, table: Table) -> None:
    section = block.prefix.rpartition(".")[2].partition("[")[0] or "the file"
    home = next((other for other, keys in reading.tables.items() if name in keys and keys is not table), None)
    if home is not None:
        hint = f"move it to `{home}`"
    else:
        hint = misspelt(name, table, "remove it: ai-toolkit ignores a key it does not know, here it is an error")
    reading.draft.problem(block.key(name), block.get(name), f"a key that ai-toolkit knows in {section}", hint)
