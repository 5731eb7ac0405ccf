"""What the outside sees stays as an earlier commit recorded it. Where a change is meant, scripts/record_black_box.py
records it again and prints what changed; the commit says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import black_box

SHOWN = 60


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    "name",
    [
        *(group.__name__ for group in black_box.EVERYDAY),
        *(pytest.param(group.__name__, marks=pytest.mark.full) for group in black_box.FULL),
    ],
)
def test_nothing_that_was_recorded_changed(name: str, models: Path, tmp_path: Path) -> None:
    now = black_box.record(name, black_box.Work.prepared(tmp_path / "work", models))
    found = black_box.differences(black_box.read(name), now)
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    hint = f"if this is meant: python scripts/record_black_box.py {name}"
    assert not found, "\n".join(["recorded -> now", *found[:SHOWN], *more, hint])
