"""The record of the entries made by the processes of a run, for the one that removes them."""

from __future__ import annotations

from pathlib import Path

from gracetune.cache.created_entries import CreatedEntries
from gracetune.cache.folders import CacheFolders
from gracetune.cache.keys import Key
from gracetune.cache.session import Caches
from unit.cache.samples import entry, key, origin


def encode(folder: Path, made: CreatedEntries | None, *numbers: int) -> Path:
    """Encode as a process of a run does. Returns the store."""
    folders = CacheFolders(folder, folder, {})
    with Caches(folders, writable=True, before_writing=None if made is None else made.note) as caches:
        store = caches.store(folders.text())
        with store.writer() as writer:
            for number in numbers:
                writer.add(origin(number), entry(number))
        return store.folder


def test_entries_of_all_ranks_and_of_earlier_processes_are_known(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for rank, numbers in ((0, (1, 2)), (1, (3,)), (0, (4,))):
        store = encode(tmp_path / "cache", CreatedEntries(run, rank), *numbers)
    encode(tmp_path / "cache", None, 5)  # of another run
    for _ in range(2):
        assert CreatedEntries(run, 0).take_over() == {store: {key(number) for number in range(1, 5)}}
    assert [path.name for path in run.iterdir()] == [".gracetune-made-0.jsonl"]
    CreatedEntries(run, 0).forget()
    assert [*run.iterdir()] == []


def test_what_was_announced_and_never_written_is_not_the_runs(tmp_path: Path) -> None:
    made = CreatedEntries(tmp_path / "run", 0)
    store = encode(tmp_path / "cache", made, 1)
    made.note(store, [key(2)])
    made.note(tmp_path / "gone", [key(3)])
    assert made.take_over() == {store: {key(1)}}
    encode(tmp_path / "cache", None, 2)  # another run makes it meanwhile
    assert CreatedEntries(tmp_path / "run", 0).take_over() == {store: {key(1)}}


def test_lines_that_are_torn_or_strange_are_left_out(tmp_path: Path) -> None:
    made = CreatedEntries(tmp_path / "run", 0)
    store = encode(tmp_path / "cache", made, 1)
    (file,) = (tmp_path / "run").iterdir()
    with file.open("ab") as log:
        log.write(b'[]\n{"store": 1, "keys": []}\n{"store": "x", "keys": [3, "' + b"z" * 32 + b'"]}\n\xff\n{"store": "')
    made.note(store, [Key("0" * 32)])
    assert made.take_over() == {store: {key(1)}}


def test_where_no_record_can_be_written_entries_are_made_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file, not a folder")
    made = CreatedEntries(tmp_path / "run", 0)
    encode(tmp_path / "cache", made, 1)
    assert made.take_over() == {}
