"""One table type for all dialects: what each key does can be listed, and a dialect more is a table and a function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gracetune.config.dialects import DIALECTS
from gracetune.config.dialects.listing import document
from gracetune.config.dialects.peer_file import PeerBlock, PeerFile
from gracetune.config.dialects.table import (
    Dialect,
    Effect,
    IsFalse,
    Key,
    KeyRule,
    KeyTable,
    OneOf,
    apply,
    check,
    noted,
    rejected,
)
from gracetune.config.dialects.values import as_number
from gracetune.config.draft import Draft, Origin
from gracetune.config.environment import Environment
from gracetune.config.syntax import Document

TABLES = [
    pytest.param(table, id=f"{dialect.name}: {name}") for dialect in DIALECTS for name, table in dialect.tables.items()
]


@pytest.mark.parametrize("table", TABLES)
def test_every_key_says_what_is_done_with_it(table: KeyTable[Any]) -> None:
    for name, key in table.keys.items():
        assert key.name == name
        if key.effect is Effect.ACTS:
            assert not key.note
            assert key.unless is None
        else:
            assert key.note
            assert key.path is None
        if key.effect is Effect.REJECTED:
            assert key.unless is not None  # some value of it must be allowed: a file may have the peer's default


def test_a_key_stands_in_a_table_once() -> None:
    with pytest.raises(ValueError, match="steps"):
        KeyTable(Key("steps"), Key("steps"))


def test_the_page_of_keys_is_made_from_the_tables() -> None:
    page = Path(__file__).parents[3] / "docs" / "dialect-keys.md"
    hint = "PYTHONPATH=src python -m gracetune.config.dialects.listing > docs/dialect-keys.md"
    assert page.read_text(encoding="utf-8") == document(), hint


# -- a third dialect ---------------------------------------------------------------------------------------------------


def _length(block: PeerBlock, batch: int) -> None:
    if "images" in block:
        block.assign(("training", "max_steps"), as_number(block.get("images")) // batch, "images")


OPTIONS: KeyTable[int] = KeyTable(
    Key("learning_rate", ("optimizer", "lr"), as_number, default=1e-3),
    KeyRule(_length, "images"),
    *noted("not used", "threads colour", unless=IsFalse()),
    rejected("magic", OneOf((0,)), "0: there is none"),
)


def _read(document: Document, draft: Draft, environment: Environment) -> None:
    reading = PeerFile("Third", draft)
    block = PeerBlock(reading, document.data)
    check(block, OPTIONS)
    apply(block, OPTIONS, 2)
    reading.note_unused()


THIRD = Dialect("third", lambda data: "images" in data, _read, {"the file": OPTIONS})


def _draft(data: Mapping[str, Any]) -> Draft:
    draft = Draft("third.json")
    document = Document(Path("third.json"), "JSON", "", data)
    assert THIRD.recognizes(data)
    THIRD.read(document, draft, Environment({}))
    return draft


def test_values_reach_the_draft_with_where_they_came_from() -> None:
    draft = _draft({"images": "8", "learning_rate": "1e-4", "threads": 4, "colour": False, "magic": 0})
    assert draft.tree == {"optimizer": {"lr": 1e-4}, "training": {"max_steps": 4}}
    assert draft.origins[("training", "max_steps")] == Origin("file", "images", "third.json")
    assert draft.notes == ["not used: threads"]
    assert not draft.problems
    assert not draft.unsupported


def test_a_default_of_the_peer_is_named_as_its_own() -> None:
    assert _draft({"images": 2}).origins[("optimizer", "lr")] == Origin("default", "learning_rate", "Third")


def test_all_mistakes_arrive_together() -> None:
    draft = _draft({"images": 2, "learning_rat": 1, "zzz": 1, "magic": 3})
    assert [(problem.key, problem.hint) for problem in draft.problems] == [
        ("learning_rat", "write `learning_rate`"),
        ("zzz", "remove `zzz`"),
    ]
    assert [problem.expected for problem in draft.unsupported] == ["0: there is none"]
    assert draft.unsupported[0].hint == "write `magic: 0`, or train without it: --allow-unsupported"
