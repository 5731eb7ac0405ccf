from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gracetune.bench import data as bench
from gracetune.bench import loader as loader_bench
from gracetune.bench import startup as starting
from gracetune.bench.row import BenchRow
from gracetune.cache import required_entries as wanted
from gracetune.cache import session
from gracetune.cache.keys import Key
from gracetune.cache.store import DiskStore, FoundEntries
from gracetune.errors import MachineError
from unit.data.backends.helpers import fill, held, this_machine

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "raw", {f"{number}.bmp": os.urandom(MIB) for number in range(40)})


def test_workers_share_the_pages(folder: Path) -> None:
    before = held()
    row = bench.shared_memory_row(folder, this_machine())
    assert row.ok, row
    assert abs(row.value) < 0.10
    assert "4 workers that read all of 40" in row.detail
    assert held() == before


def test_processes_that_copy_would_be_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same measurement of workers that read the folder itself."""
    copying = """
import sys
from pathlib import Path
print("ready", flush=True)
sys.stdin.readline()
kept = [file.read_bytes() for file in Path(sys.argv[1]).iterdir()]
print("read", flush=True)
sys.stdin.read()
"""
    started = bench.subprocess.Popen

    def start(command: list[str], **options: object) -> object:
        return started([command[0], "-c", copying, str(folder)], **options)

    monkeypatch.setattr(bench.subprocess, "Popen", start)
    row = bench.shared_memory_row(folder, this_machine())
    assert row.ok is False
    assert row.value > 3


def test_staging_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 1)
    row = bench.raw_staging_row(folder, this_machine())
    assert (row.name, row.unit, row.bar) == ("staging_raw_over_reads", "ratio", ">= 0.8")
    assert row.value > 0.1
    assert row.ok == (row.value >= 0.8)
    stored, over_disk = bench.lz4_staging_rows(folder, this_machine())
    assert 0.95 < stored.value < 1.1  # noise
    assert over_disk.name == "staging_lz4_over_disk"
    assert over_disk.value > 0


def test_files_said_to_shrink_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FILES", 2)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    bench._make(tmp_path / "shrinking", bench._half_noise)
    stored = next(bench.lz4_staging_rows(tmp_path / "shrinking", this_machine()))
    assert 0.4 < stored.value < 0.6


def test_loader_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_bench, "ROUNDS", 1)
    monkeypatch.setattr(loader_bench, "IMAGES", 6)
    before = held()
    rows = list(loader_bench.loader_rows(tmp_path / "pictures", this_machine()))
    assert [(row.name, row.bar) for row in rows] == [
        ("batches_over_local", ">= 1"),
        ("batches_without_source", ">= 0.95"),
    ]
    assert all(isinstance(row, BenchRow) and row.value > 0 for row in rows)
    assert (tmp_path / "pictures").is_dir()
    assert held() == before


def test_a_warm_start_encodes_nothing(tmp_path: Path) -> None:
    starting.make_images(tmp_path / "images", 12)
    starting.fill_caches(tmp_path)
    starting._start_warm(starting._config(tmp_path), this_machine())  # raises where an entry is missing
    starting.make_images(tmp_path / "images", 13)
    with pytest.raises(ValueError, match="an entry is missing"):
        starting._start_warm(starting._config(tmp_path), this_machine())


def test_a_warm_start_computes_each_key_once_and_looks_for_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting.make_images(tmp_path / "images", 12)
    starting.fill_caches(tmp_path)
    made: list[str] = []
    looked: list[str] = []

    def noted(make: Callable[..., Key]) -> Callable[..., Key]:
        def make_and_note(*of: Any) -> Key:
            made.append(make(*of))
            return made[-1]

        return make_and_note

    class Watched(DiskStore):
        def find(self, keys: Sequence[Key]) -> FoundEntries:
            looked.extend(keys)
            return super().find(keys)

    monkeypatch.setattr(wanted, "latent_key", noted(wanted.latent_key))
    monkeypatch.setattr(wanted, "text_key", noted(wanted.text_key))
    monkeypatch.setattr(session, "DiskStore", Watched)
    starting._start_warm(starting._config(tmp_path), this_machine())
    assert len(made) == len({*made}) == 24
    assert sorted(looked) == sorted(made)


@pytest.mark.full
def test_starting_rows(tmp_path: Path) -> None:
    rows = [*starting.starting_rows(tmp_path, this_machine(), images=40, rounds=1)]
    assert [row.name for row in rows] == ["scan_two_cores", "warm_start_seconds"]
    assert all(row.value > 0 and row.detail for row in rows)
    assert rows[1].ok


def test_a_process_that_fails_is_an_error_and_no_figure(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="stage none"):
        bench.in_new_process("stage none", tmp_path / "nowhere", this_machine())
