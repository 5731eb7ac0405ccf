"""The tables in docs/adapters.md are correct."""

from __future__ import annotations

from pathlib import Path

from unit.adapters.formats import table

TEXT = (Path(__file__).parents[4] / "docs" / "adapters.md").read_text(encoding="utf-8")


def test_every_cell_of_the_table_is_what_happens(tiny_model) -> None:
    """To update the table after a change, print `table.made(tiny_model)`."""
    assert table.made(tiny_model) in TEXT


def test_the_table_of_programs_is_that_of_the_records(tiny_model) -> None:
    """To update it after a change, print `table.of_programs(tiny_model)`."""
    assert table.of_programs(tiny_model) in TEXT


def test_every_reason_in_the_table_is_explained() -> None:
    for reason, note in table.NOTES.items():
        assert f"- **{note}** " in TEXT
        explained = TEXT.partition(f"- **{note}** ")[2].partition("\n")[0]
        assert " ".join(reason.split()[-8:]) in explained
