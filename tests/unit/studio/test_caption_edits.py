"""Edits of caption files: conflicts, undo, links, and what may be written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gracetune.config.dataset_config import Captions, Dataset
from gracetune.studio.caption_edits import CaptionEdits, CaptionFolder, why_not_editable
from gracetune.studio.replies import StudioError


@pytest.fixture
def edits(tmp_path: Path) -> CaptionEdits:
    (tmp_path / "runs").mkdir()
    return CaptionEdits(tmp_path / "runs" / ".studio" / "captions")


@pytest.fixture
def captions(tmp_path: Path) -> CaptionFolder:
    (tmp_path / "photos" / "inner").mkdir(parents=True)
    (tmp_path / "photos" / "a.txt").write_text("a cat\n")
    return CaptionFolder(tmp_path / "photos", Captions())


def status_of(error: pytest.ExceptionInfo[StudioError]) -> int:
    return error.value.status


def test_edits_are_undone_in_order(edits: CaptionEdits, captions: CaptionFolder) -> None:
    file = captions.root / "a.txt"
    file.chmod(0o640)
    first = edits.save(captions, "a.png", "a dog", "a cat\n")
    second = edits.save(captions, "a.png", "a bird", "a dog")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("a bird", 0o640)
    assert edits.last(captions, "a.png") == second
    with pytest.raises(StudioError) as error:
        edits.undo(captions, first)  # the file is not as this edit left it
    assert status_of(error) == 409
    assert edits.undo(captions, second) == "a.txt"
    edits.undo(captions, first)
    assert file.read_text() == "a cat\n"
    with pytest.raises(StudioError) as error:
        edits.undo(captions, first)
    assert status_of(error) == 404


def test_a_new_caption_file_is_created_and_removed_again(edits: CaptionEdits, captions: CaptionFolder) -> None:
    undo = edits.save(captions, "inner/b.jpeg", "naïve café", None)
    assert (captions.root / "inner" / "b.txt").read_bytes() == "naïve café".encode()
    edits.undo(captions, undo)
    assert not (captions.root / "inner" / "b.txt").exists()


def test_a_file_that_has_changed_is_kept(edits: CaptionEdits, captions: CaptionFolder) -> None:
    for was in ("another", None):
        with pytest.raises(StudioError, match=r"a\.txt has changed") as error:
            edits.save(captions, "a.png", "mine", was)
        assert status_of(error) == 409
    (captions.root / "a.txt").unlink()
    with pytest.raises(StudioError, match="was removed"):
        edits.save(captions, "a.png", "mine", "a cat\n")
    assert not (captions.root / "a.txt").exists()


def test_line_ends_of_a_browser_and_of_windows_are_the_same(edits: CaptionEdits, captions: CaptionFolder) -> None:
    (captions.root / "a.txt").write_bytes(b"one\r\ntwo")
    edits.save(captions, "a.png", "one\nthree", "one\ntwo")
    assert (captions.root / "a.txt").read_bytes() == b"one\r\nthree"


def test_the_spelling_of_the_extension_is_kept(edits: CaptionEdits, captions: CaptionFolder) -> None:
    (captions.root / "c.TXT").write_text("old")
    edits.save(captions, "c.png", "new", "old")
    assert (captions.root / "c.TXT").read_text() == "new"
    assert not (captions.root / "c.txt").exists()


def test_links_out_of_the_dataset_are_never_followed(edits: CaptionEdits, captions: CaptionFolder) -> None:
    outside = captions.root.parent / "outside"
    outside.mkdir()
    secret = outside / "secret.txt"
    secret.write_text("secret")
    (captions.root / "s.txt").symlink_to(secret)
    (captions.root / "folder").symlink_to(outside)
    (captions.root / "key.txt").symlink_to(captions.root / "key.pem")
    for media in ("s.png", "folder/secret.png", "../outside/secret.png", "key.png", "folder/new.png"):
        for was in ("secret", None):
            with pytest.raises(StudioError) as error:
                edits.save(captions, media, "overwritten", was)
            assert status_of(error) == 409
    assert secret.read_text() == "secret"
    assert [path.name for path in outside.iterdir()] == ["secret.txt"]
    assert not (captions.root / "key.pem").exists()


def test_a_link_inside_the_dataset_is_edited_where_it_leads(edits: CaptionEdits, captions: CaptionFolder) -> None:
    (captions.root / "b.txt").symlink_to("a.txt")
    edits.save(captions, "b.png", "both", "a cat\n")
    assert (captions.root / "b.txt").is_symlink()
    assert (captions.root / "a.txt").read_text() == "both"


@pytest.mark.parametrize("text", ["x" * 600_000, "x" * 40_000, "a\0b", "half \ud800"])
def test_text_that_no_run_accepts_is_rejected(text: str, edits: CaptionEdits, captions: CaptionFolder) -> None:
    with pytest.raises(StudioError) as error:
        edits.save(captions, "a.png", text, "a cat\n")
    assert status_of(error) == 400
    assert (captions.root / "a.txt").read_text() == "a cat\n"


def test_of_many_writers_one_wins(edits: CaptionEdits, captions: CaptionFolder) -> None:
    saved: list[str] = []

    def write(number: int) -> None:
        try:
            edits.save(captions, "a.png", f"text {number}", "a cat\n")
            saved.append(f"text {number}")
        except StudioError as error:
            assert error.status == 409

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert saved == [(captions.root / "a.txt").read_text()]


def test_files_that_are_no_captions_are_named(edits: CaptionEdits, captions: CaptionFolder) -> None:
    (captions.root / "a.txt").write_bytes(b"\xff\xfe1")
    with pytest.raises(StudioError, match="not UTF-8"):
        edits.save(captions, "a.png", "x", "")
    for identifier in ("", "../../a", "0" * 20, "x" * 5000, f"{'0' * 20}-abcdef"):
        with pytest.raises(StudioError, match="no such edit"):
            edits.undo(captions, identifier)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, ""),
        ({"captions": {"strategy": "filename"}}, "the file names"),
        ({"captions": {"strategy": "csv", "table": {"path": "captions.csv"}}}, "a table: captions.csv"),
        ({"path": "hf://datasets/someone/cats"}, "a copy of hf://datasets/someone/cats"),
        ({"path": "/nowhere/at/all"}, "not a folder"),
    ],
)
def test_the_reason_why_captions_cannot_be_edited(values: dict[str, object], why: str, tmp_path: Path) -> None:
    dataset = Dataset.model_validate({"id": "photos", "path": str(tmp_path), **values})
    reason = why_not_editable(dataset, Path(dataset.path))
    assert why in reason
    assert bool(why) == bool(reason)
