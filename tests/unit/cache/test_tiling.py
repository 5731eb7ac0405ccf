from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gracetune.cache.tiling import FILE, TilingNotes
from unit.cache.samples import TEXT, VAE


def test_what_is_remembered_is_known_until_it_is_forgotten(tmp_path: Path) -> None:
    notes, other = TilingNotes(tmp_path / "new"), replace(VAE, weights="other")
    assert notes.why(VAE) is None
    notes.remember(VAE, "it did not fit")
    notes.remember(other, "nor did this")
    again = TilingNotes(tmp_path / "new")
    assert (again.why(VAE), again.why(other), again.why(TEXT)) == ("it did not fit", "nor did this", None)
    again.forget(VAE)
    again.forget(TEXT)
    assert (notes.why(VAE), notes.why(other)) == (None, "nor did this")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE]


@pytest.mark.parametrize(
    "content", [b"mine", b"{}", b'{"format": "gracetune-tiling", "version": 2, "encoders": {"a": "b"}}']
)
def test_a_file_that_is_not_ours_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    notes = TilingNotes(tmp_path)
    notes.remember(VAE, "it did not fit")
    notes.forget(VAE)
    assert notes.why(VAE) is None
    assert (tmp_path / FILE).read_bytes() == content


def test_where_nothing_can_be_written_nothing_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    notes = TilingNotes(tmp_path / "file")
    notes.remember(VAE, "it did not fit")
    assert notes.why(VAE) is None
