from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gracetune_simpletuner.errors import EntryChangedError
from gracetune_simpletuner.residents import Residents, needed_bytes
from gracetune_simpletuner.telemetry import Counts

from gracetune.cache.residence import CacheResources, CacheType
from gracetune.hardware import probe
from gracetune.hostmem.sensors import HostReading, HostSensor


@pytest.fixture(scope="module")
def location() -> CacheResources:
    return CacheResources(probe())


@pytest.fixture
def counts() -> Counts:
    return Counts()


def residents(location: CacheResources, counts: Counts, kind: CacheType = "unified_memory") -> Residents:
    return Residents({"latent_cache": kind, "text_cache": kind}, location, counts)


def write(folder: Path, entries: dict[str, Any]) -> list[str]:
    for name, value in entries.items():
        torch.save(value, folder / name)
    return [str(folder / name) for name in entries]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(same, one, other))
    return bool(one == other)


def load(path: str) -> Any:
    return torch.load(path, weights_only=True)


def test_entries_come_back_as_they_were_and_the_files_are_not_needed(
    tmp_path: Path, location: CacheResources, counts: Counts
) -> None:
    entries = {
        "tensor.pt": torch.randn(4, 8, 8),
        "turned.pt": torch.randn(4, 6).t(),
        "part.pt": torch.randn(8, 8)[:, ::2],
        "empty.pt": torch.zeros(0, 3),
        "one.pt": torch.tensor(3.0, dtype=torch.bfloat16),
        "dict.pt": {"latents": torch.arange(5, dtype=torch.int16), "rest": [None, (1, "a", torch.ones(3, dtype=bool))]},
    }
    held = residents(location, counts)
    files = write(tmp_path, entries)
    held.fill("latent_cache", str(tmp_path), files, load)
    for file in files:
        Path(file).unlink()
    for name, expected in entries.items():
        found = held.look_up(str(tmp_path / name))
        assert same(found, expected)
        assert (tmp_path / name) in held
    assert held.look_up(str(tmp_path / "turned.pt")).stride() == entries["turned.pt"].stride()
    assert counts.snapshot()["hits"] == len(entries) + 1
    assert held.look_up(str(tmp_path / "other.pt")) is None


def test_a_hit_has_containers_of_its_own_and_no_copies(
    tmp_path: Path, location: CacheResources, counts: Counts
) -> None:
    held = residents(location, counts)
    (file,) = write(tmp_path, {"a.pt": {"latents": torch.ones(3), "list": [1]}})
    held.fill("latent_cache", str(tmp_path), [file], load)
    first = held.look_up(file)
    first["latents"], address = None, first["latents"].data_ptr()
    first["list"].append(2)
    again = held.look_up(file)
    assert again["list"] == [1]
    assert again["latents"].data_ptr() == address


def test_a_write_into_an_entry_is_noticed(tmp_path: Path, location: CacheResources, counts: Counts) -> None:
    held = residents(location, counts)
    files = write(tmp_path, {"a.pt": torch.ones(3), "b.pt": torch.ones(3)})
    held.fill("latent_cache", str(tmp_path), files, load)
    (held.look_up(files[0]) * 2).add_(1)  # of a copy: fine
    held.look_up(files[0])
    held.look_up(files[0]).mul_(2)
    with pytest.raises(EntryChangedError, match="changed in place"):
        held.look_up(files[1])


def test_a_hit_while_validating_can_be_trained_on_later(
    tmp_path: Path, location: CacheResources, counts: Counts
) -> None:
    held = residents(location, counts)
    files = write(tmp_path, {"a.pt": torch.ones(3)})
    with torch.inference_mode():
        held.fill("latent_cache", str(tmp_path), files, load)
        found = held.look_up(files[0])
    assert not found.is_inference()
    weight = torch.ones(3, requires_grad=True)
    (found * weight).sum().backward()
    assert weight.grad is not None


def test_what_cannot_lie_in_a_slab_stays_on_disk_with_its_reason(
    tmp_path: Path, location: CacheResources, counts: Counts
) -> None:
    held = residents(location, counts)
    files = write(tmp_path, {"set.pt": {"a": {1, 2}}, "sparse.pt": torch.eye(3).to_sparse(), "ok.pt": torch.ones(1)})
    held.fill("latent_cache", str(tmp_path), [*files, str(tmp_path / "late.pt")], load)
    assert len(held) == 1
    rejected = counts.snapshot()["refused"]["entries_left_on_disk"]
    assert sum(rejected.values()) == 3
    assert rejected["not written yet"] == 1
    assert any("set" in reason for reason in rejected)


def test_an_entry_that_is_read_later_is_kept_too_but_only_of_folders_it_knows(
    tmp_path: Path, location: CacheResources, counts: Counts
) -> None:
    held = residents(location, counts)
    known, other = str(tmp_path / "cache" / "a.pt"), str(tmp_path / "other" / "a.pt")
    held.fill("text_cache", str(tmp_path / "cache"), [], load)
    held.offer(known, torch.ones(2))
    held.offer(other, torch.ones(2))
    assert known in held
    assert other not in held
    held.forget(known)
    assert held.look_up(known) is None
    held.offer(known, torch.zeros(2))
    assert held.look_up(known).tolist() == [0, 0]


def test_without_room_entries_stay_on_disk(
    tmp_path: Path, location: CacheResources, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostSensor, "read", lambda sensor: HostReading(0, None))
    held = residents(location, counts)
    held.fill("latent_cache", str(tmp_path), write(tmp_path, {"a.pt": torch.ones(3)}), load)
    assert len(held) == 0
    assert counts.snapshot()["refused"] == {"entries_left_on_disk": {"main memory has no room to spare": 1}}


def test_where_it_lives_and_why_is_told(tmp_path: Path, location: CacheResources, counts: Counts) -> None:
    held = residents(location, counts)
    held.fill("latent_cache", str(tmp_path), write(tmp_path, {"a.pt": torch.ones(300)}), load)
    (message,) = held.report()
    assert message["place"] == "host"
    assert message["used_bytes"] == needed_bytes(torch.ones(300)) == 1216
    assert "cache type unified_memory is not used on this machine" in message["notes"][0]
    held.close()
    assert held.held_bytes == len(held) == 0
