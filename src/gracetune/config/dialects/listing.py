"""Lists every key of the peers' files and its effect, from the key tables.

`python -m gracetune.config.dialects.listing` prints `docs/dialect-keys.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gracetune.config.dialects import DIALECTS
from gracetune.config.dialects.table import Always, Effect, KeyRule, KeyTable
from gracetune.config.draft import dotted

_INTRODUCTION = """# Keys of ai-toolkit and SimpleTuner

Made from the tables in `src/gracetune/config/dialects` (`python -m gracetune.config.dialects.listing`). Each key of a
file does one of three things. It becomes part of the config; or it does not change what is learned, and is listed in a
note; or it would change what is learned, and is rejected unless its value has no effect (`--allow-unsupported` ignores
it). An unknown key is an error that suggests the nearest name.
"""


def document() -> str:
    """Return the text of docs/dialect-keys.md."""
    lines = [_INTRODUCTION]
    for dialect in DIALECTS:
        if dialect.tables:
            lines.append(f"## {dialect.name}\n")
        for name, table in dialect.tables.items():
            lines += [f"### {name}\n", *_table(table), ""]
    return "\n".join(lines)


def _table(table: KeyTable[Any]) -> Iterator[str]:
    alone = [key for key in table.keys.values() if key.path is not None]
    if alone:
        yield f"- one value each: {', '.join(f'`{key.name}` → `{dotted(key.path or ())}`' for key in alone)}"
    together = [rule.keys for rule in table.entries if isinstance(rule, KeyRule) and rule.keys]
    for names in together:
        yield f"- read together: {_names(names)}"
    elsewhere = [*_in_no_rule(table, {name for names in together for name in names})]
    if elsewhere:
        yield f"- decide how the others are read: {_names(elsewhere)}"
    for effect in (Effect.NOTED, Effect.REJECTED):
        for (what, note), listed in _by_note(table, effect).items():
            yield f"- {what} ({note}): {_names(listed)}"


def _in_no_rule(table: KeyTable[Any], ruled: set[str]) -> Iterator[str]:
    for name, key in table.keys.items():
        if key.effect is Effect.ACTS and key.path is None and name not in ruled:
            yield name


def _by_note(table: KeyTable[Any], effect: Effect) -> dict[tuple[str, str], list[str]]:
    """Names of the keys by what is done with them, and by their note."""
    found: dict[tuple[str, str], list[str]] = {}
    for key in (key for key in table.keys.values() if key.effect is effect):
        what = "rejected" if effect is Effect.REJECTED else "noted"
        if isinstance(key.unless, Always):
            what = "ignored without a message"
        found.setdefault((what, key.note), []).append(key.name)
    return found


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(document(), end="")
