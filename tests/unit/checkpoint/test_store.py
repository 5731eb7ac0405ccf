"""Writing, reading, keeping and deleting checkpoints."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from gracetune.checkpoint.errors import (
    BusyFolderError,
    CheckpointError,
    CheckpointFullError,
    DamagedCheckpointError,
    MissingStateError,
    OtherRunError,
)
from gracetune.checkpoint.folder import superfluous
from gracetune.checkpoint.manifest import Metadata
from gracetune.checkpoint.state_parts import SavedState, StateSnapshot, saved_size, snapshot
from gracetune.checkpoint.store import CheckpointStore
from gracetune.storage.atomic import temporary_name
from gracetune.storage.safetensors_files import TORCH_DTYPES, file_chunks
from unit.cache.processes import Child
from unit.checkpoint.states import IDENTITY, METADATA, Counter, Weights, check, filled, names, write


class TestWriting:
    def test_what_was_saved_comes_back_to_the_bit(self, tmp_path: Path) -> None:
        store = filled(tmp_path, 7)
        latest = store.latest()
        assert latest == tmp_path / "checkpoint-7"
        check(store.open(latest), 7)
        assert names(latest) == ["counter.json", "manifest.json", "weights.json", "weights.safetensors"]

    @pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
    def test_every_dtype_comes_back(self, tmp_path: Path, dtype: torch.dtype) -> None:
        raw = torch.arange(48, dtype=torch.uint8).remainder(2) if dtype is torch.bool else torch.arange(48).byte()
        tensors = {"one": raw.view(dtype), "none": torch.empty(0, 3, dtype=dtype), "scalar": raw.view(dtype)[0]}
        store = CheckpointStore(tmp_path, 1)
        store.write(1, [Holder(tensors)], metadata=METADATA)
        store.close()
        found = store.open(tmp_path / "checkpoint-1").saved("holder").tensors
        for name, tensor in tensors.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert found[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))

    def test_views_and_strides_become_plain_tensors(self, tmp_path: Path) -> None:
        base = torch.arange(24.0).reshape(4, 6)
        tensors = {"turned": base.T, "slice": base[1:3, ::2], "expanded": base[:, :1].expand(4, 9), "same": base}
        store = CheckpointStore(tmp_path, 1)
        store.write(1, [Holder(tensors)], metadata=METADATA)
        store.close()
        found = store.open(tmp_path / "checkpoint-1").saved("holder").tensors
        assert all(found[name].equal(tensor) for name, tensor in tensors.items())

    def test_training_on_while_it_is_written_changes_nothing_in_it(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, 3)
        weights, counter = Weights(1, 1_000_000), Counter(value=1)
        store.write(1, [weights, counter], metadata=METADATA)
        weights.move_to(2)
        counter.value = 2
        store.close()
        check(store.open(tmp_path / "checkpoint-1"), 1, 1_000_000)

    def test_a_state_in_place_is_not_copied_and_written_before_the_run_continues(self, tmp_path: Path) -> None:
        class InPlace(Weights):
            def save(self) -> SavedState:
                return replace(super().save(), in_place=True)

        store, weights, mapped = CheckpointStore(tmp_path, 3), InPlace(1, 1_000_000), Weights(0, 1_000_000)
        saved = weights.save()
        assert all(one is saved.tensors[name] for name, one in snapshot("weights", saved).tensors.items())
        store.write(1, [weights], metadata=METADATA)
        weights.move_to(2)
        store.close()
        (written,) = store.finished()
        assert written.snapshot_ms >= written.write_ms
        store.open(tmp_path / "checkpoint-1").load([mapped], copied=("weights",))
        mapped.step = 1
        assert mapped.is_right()

    def test_the_manifest_says_what_was_given(self, tmp_path: Path) -> None:
        store = filled(tmp_path, 7)
        manifest = store.open(tmp_path / "checkpoint-7").manifest
        assert manifest.metadata == METADATA
        assert (manifest.step, manifest.world_size) == (7, 1)
        text = json.loads((tmp_path / "checkpoint-7" / "manifest.json").read_text())
        assert (text["format"], text["version"]) == ("gracetune-checkpoint", 1)
        for name, fact in text["files"].items():
            assert (tmp_path / "checkpoint-7" / name).stat().st_size == fact["size"]

    def test_each_write_is_reported_once(self, tmp_path: Path) -> None:
        with CheckpointStore(tmp_path, 1) as store:
            write(store, 1, 2)
            first, second = store.finished()
            assert (first.step, second.step, first.removed, second.removed) == (1, 2, (), ("checkpoint-1",))
            assert second.size == sum(path.stat().st_size for path in second.path.iterdir())
            assert store.finished() == ()

    def test_one_background_thread_writes(self, tmp_path: Path) -> None:
        with CheckpointStore(tmp_path, 5) as store:
            for step in range(4):
                store.write(step, [Weights(step, 200_000)], metadata=METADATA)
                mine = [one for one in threading.enumerate() if one.name.startswith("gracetune-checkpoint")]
                assert len(mine) == 1
        assert names(tmp_path) == [f"checkpoint-{step}" for step in range(4)]
        assert [one for one in threading.enumerate() if one.name.startswith("gracetune-checkpoint")] == []

    def test_every_file_and_folder_is_synced_before_the_name_appears(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log: list[str] = []
        fsync, rename = os.fsync, Path.rename

        def spying_fsync(descriptor: int) -> None:
            log.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            fsync(descriptor)

        def spying_rename(path: Path, target: Path) -> Path:
            log.append(f"{path} -> {target.name}")
            return rename(path, target)

        monkeypatch.setattr(os, "fsync", spying_fsync)
        monkeypatch.setattr(Path, "rename", spying_rename)
        with CheckpointStore(tmp_path, 5) as store:
            write(store, 3)
        temporary = log[-2].split(" -> ")[0]
        inside = ["weights.json", "weights.safetensors", "counter.json", "manifest.json"]
        assert log == [
            *(f"{temporary}/{name}" for name in inside),
            temporary,
            f"{temporary} -> checkpoint-3",
            str(tmp_path),
        ]

    def test_the_same_step_again_after_nothing_happened_is_the_checkpoint_that_is_there(self, tmp_path: Path) -> None:
        with CheckpointStore(tmp_path, 5) as store:
            write(store, 3)
            before = (tmp_path / "checkpoint-3" / "manifest.json").stat()
            write(store, 3)
            assert (tmp_path / "checkpoint-3" / "manifest.json").stat() == before

    def test_a_name_that_is_taken_is_rejected_and_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoint-3").write_text("mine")
        with CheckpointStore(tmp_path, 5) as store, pytest.raises(CheckpointError, match="mv "):
            write(store, 3)
        assert (tmp_path / "checkpoint-3").read_text() == "mine"

    @pytest.mark.parametrize(
        ("value", "match"),
        [
            ({"value": 1}, "no integer `version`"),
            ({"version": True}, "no integer"),
            ({"version": 1, "loss": float("nan")}, "not plain JSON"),
            ({"version": 1, "by": {3: 4}}, "a key that is not a string: 3"),
            ({"version": 1, "by": [{3: 4}]}, "a key that is not a string: 3"),
            ({"version": 1, "what": {1, 2}}, "not plain JSON"),
        ],
    )
    def test_state_that_json_would_change_is_rejected(self, tmp_path: Path, value: dict[str, Any], match: str) -> None:
        with CheckpointStore(tmp_path, 5) as store, pytest.raises(ValueError, match=match):
            store.write(1, [Holder({}, value)], metadata=METADATA)
        assert names(tmp_path) == []

    def test_two_pieces_of_one_name_or_a_name_with_a_path_are_rejected(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, 5)
        with pytest.raises(ValueError, match="two state parts"):
            store.write(1, [Counter()], metadata=METADATA, per_rank=[Counter()])
        with pytest.raises(ValueError, match="lower-case letters"):
            store.write(1, [Counter(name="../up")], metadata=METADATA)
        with pytest.raises(ValueError, match="'manifest'"):
            store.write(1, [Counter(name="manifest")], metadata=METADATA)
        with pytest.raises(ValueError, match="__metadata__"):
            store.write(1, [Holder({"__metadata__": torch.ones(1)})], metadata=METADATA)
        store.close()

    @given(
        st.dictionaries(
            st.text(min_size=1, max_size=20),
            st.tuples(st.sampled_from([torch.float32, torch.int8, torch.bfloat16]), st.lists(st.integers(0, 4))),
            max_size=5,
        )
    )
    def test_the_size_asked_of_the_disk_is_never_too_small(
        self, shapes: dict[str, tuple[torch.dtype, list[int]]]
    ) -> None:
        tensors = {name: torch.ones(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
        state = StateSnapshot(b'{"version":1}', tensors)
        real = len(state.json) + sum(len(part) for part in file_chunks(tensors))
        assert real <= state.size == saved_size("x", SavedState({"version": 1}, tensors))

    def test_any_safetensors_reader_can_read_it(self, tmp_path: Path) -> None:
        filled(tmp_path, 7)
        assert load_file(tmp_path / "checkpoint-7" / "weights.safetensors")["a.weight"].equal(
            Weights(7).tensors["a.weight"]
        )


class Holder:
    name = "holder"

    def __init__(self, tensors: dict[str, torch.Tensor], value: dict[str, Any] | None = None) -> None:
        self.tensors, self.value = tensors, value or {"version": 1}

    def save(self) -> SavedState:
        return SavedState(self.value, self.tensors)

    def load(self, json: Any, tensors: Any) -> None:
        raise NotImplementedError


class TestKeeping:
    @given(st.sets(st.integers(0, 200), max_size=40), st.integers(1, 10), st.none() | st.integers(1, 50))
    def test_the_last_and_every_mth_are_kept_and_nothing_else(
        self, steps: set[int], last: int, every: int | None
    ) -> None:
        gone = set(superfluous(steps, last, every))
        kept = steps - gone
        assert gone <= steps
        newest = sorted(steps)[-last:]
        assert kept == {step for step in steps if step in newest or (every is not None and step % every == 0)}

    def test_on_disk(self, tmp_path: Path) -> None:
        with CheckpointStore(tmp_path, 2, 20) as store:
            write(store, *range(5, 65, 5))
        assert names(tmp_path) == ["checkpoint-20", "checkpoint-40", "checkpoint-55", "checkpoint-60"]

    def test_what_is_not_ours_stays(self, tmp_path: Path) -> None:
        filled(tmp_path, 1, 2, 3)
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "checkpoint-1" / "notes.txt").write_text("mine")
        (tmp_path / "checkpoint-final").mkdir()
        (tmp_path / "checkpoint-0002").mkdir()
        elsewhere = tmp_path.parent / "elsewhere"
        filled(elsewhere, 0)
        (tmp_path / "checkpoint-0").symlink_to(elsewhere / "checkpoint-0")
        with CheckpointStore(tmp_path, 1) as store:
            write(store, 9)
            (written,) = store.finished()
        assert written.removed == ("checkpoint-2", "checkpoint-3")
        assert "notes.txt" in " ".join(written.notes)
        assert names(tmp_path) == [
            "checkpoint-0", "checkpoint-0002", "checkpoint-1", "checkpoint-9", "checkpoint-final", "notes.txt",
        ]  # fmt: skip
        check(store.open(elsewhere / "checkpoint-0"), 0)

    def test_one_of_another_run_that_arrives_later_is_not_deleted(self, tmp_path: Path) -> None:
        with CheckpointStore(tmp_path / "dogs", 1) as dogs:
            dogs.write(1, [Counter()], metadata=Metadata({"name": "dogs"}))
        with CheckpointStore(tmp_path / "cats", 1) as cats:
            write(cats, 2)
            (tmp_path / "dogs" / "checkpoint-1").rename(tmp_path / "cats" / "checkpoint-1")
            write(cats, 3)
        assert names(tmp_path / "cats") == ["checkpoint-1", "checkpoint-3"]

    def test_a_damaged_one_is_never_deleted(self, tmp_path: Path) -> None:
        filled(tmp_path, 1, 2)
        (tmp_path / "checkpoint-1" / "manifest.json").write_text("{")
        with CheckpointStore(tmp_path, 1) as store:
            write(store, 3)
        assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]

    def test_left_overs_of_a_killed_process_go_and_look_alikes_stay(self, tmp_path: Path) -> None:
        filled(tmp_path, 1)
        left, alike = tmp_path / f".gracetune-{'a' * 32}.tmp", tmp_path / ".gracetune-mine.tmp"
        for folder in (left, alike):
            folder.mkdir()
            (folder / "weights.safetensors").write_bytes(b"half")
        with CheckpointStore(tmp_path, 5) as store:
            assert store.latest() == tmp_path / "checkpoint-1"
            store.claim(IDENTITY)
        assert names(tmp_path) == [".gracetune-mine.tmp", "checkpoint-1"]

    @pytest.mark.parametrize(("last", "every"), [(0, None), (1, 0)])
    def test_keeping_nothing_is_rejected(self, tmp_path: Path, last: int, every: int | None) -> None:
        with pytest.raises(ValueError, match="keep"):
            CheckpointStore(tmp_path, last, every)


class TestDamage:
    @pytest.mark.parametrize("file", ["counter.json", "weights.json", "weights.safetensors", "manifest.json"])
    @pytest.mark.parametrize("mode", ["flip", "cut", "longer", "gone"])
    def test_is_named_with_the_last_good_one(self, tmp_path: Path, file: str, mode: str) -> None:
        store = filled(tmp_path, 1, 2, 3)
        spoil(tmp_path / "checkpoint-3" / file, mode)
        with pytest.raises(DamagedCheckpointError) as caught:
            store.open(tmp_path / "checkpoint-3")
        assert file in caught.value.problem.key
        assert f"--resume {tmp_path / 'checkpoint-2'}" in caught.value.problem.hint

    def test_a_damaged_one_is_never_proposed(self, tmp_path: Path) -> None:
        store = filled(tmp_path, 1, 2, 3)
        for step in (3, 2):
            spoil(tmp_path / f"checkpoint-{step}" / "weights.safetensors", "flip")
        with pytest.raises(DamagedCheckpointError, match=r"--resume .*checkpoint-1;"):
            store.open(tmp_path / "checkpoint-3")
        spoil(tmp_path / "checkpoint-1" / "manifest.json", "flip")
        with pytest.raises(DamagedCheckpointError, match="--resume none"):
            store.open(tmp_path / "checkpoint-3")

    def test_any_flipped_byte_is_noticed(self, tmp_path: Path) -> None:
        with CheckpointStore(tmp_path, 1) as store:
            write(store, 1, size=10)
        folder = tmp_path / "checkpoint-1"
        for path in folder.iterdir():
            whole = path.read_bytes()
            for file in range(0, len(whole), 3):
                path.write_bytes(whole[:file] + bytes([whole[file] ^ 1]) + whole[file + 1 :])
                with pytest.raises(CheckpointError):
                    store.open(folder)
            path.write_bytes(whole)
        check(store.open(folder), 1, 10)

    @pytest.mark.parametrize(
        ("version", "found"),
        [(2, "format version 2, written by a newer release"), (0, "format version 0"), (None, "format version None"),
         (True, "format version True")],
    )  # fmt: skip
    def test_another_format_is_not_called_damaged(self, version: object, found: str, tmp_path: Path) -> None:
        store = filled(tmp_path, 1)
        path = tmp_path / "checkpoint-1" / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))
        with pytest.raises(CheckpointError, match=rf"(?s){found}\n.*format version 1\n.*nothing was changed") as caught:
            store.open(tmp_path / "checkpoint-1")
        assert not isinstance(caught.value, DamagedCheckpointError)


def spoil(path: Path, mode: str) -> None:
    whole = path.read_bytes()
    if mode == "gone":
        path.unlink()
        return
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :]
    path.write_bytes({"flip": changed, "cut": whole[:-2], "longer": whole + b"x"}[mode])


class TestParts:
    def test_state_the_checkpoint_lacks_is_an_error_before_anything_is_loaded(self, tmp_path: Path) -> None:
        checkpoint = filled(tmp_path, 4).open(tmp_path / "checkpoint-4")
        weights = Weights(0)
        with pytest.raises(MissingStateError, match="ema"):
            checkpoint.load([weights, Counter(name="ema")])
        assert weights.step == 0

    def test_what_was_loaded_outlives_its_files(self, tmp_path: Path) -> None:
        def work(report: Callable[[str], None]) -> None:
            checkpoint = filled(tmp_path, 4).open(tmp_path / "checkpoint-4")
            weights = Weights(0)
            checkpoint.load([weights, Counter()])
            for path in checkpoint.path.iterdir():
                os.truncate(path, 0)
            assert weights.is_right()

        Child(work).join()  # a process of its own: touching a mapping of these files would be its end

    def test_state_nobody_asks_for_is_told(self, tmp_path: Path) -> None:
        checkpoint = filled(tmp_path, 4).open(tmp_path / "checkpoint-4")
        (note,) = checkpoint.load([Weights(0)])
        assert "also contains counter" in note


class TestSeveralProcesses:
    class Rank:
        """One of several ranks. The ranks are called one after the other, rank 0 last."""

        def __init__(self, rank: int, world_size: int, box: dict[int, bytes]) -> None:
            self.rank, self.world_size, self._box = rank, world_size, box

        def gather(self, mine: bytes) -> list[bytes]:
            self._box[self.rank] = mine
            return [self._box.get(rank, b"") for rank in range(self.world_size)]

    def made(self, folder: Path, world_size: int) -> CheckpointStore:
        box: dict[int, bytes] = {}
        store = CheckpointStore(folder, 3)
        for rank in reversed(range(world_size)):
            store = CheckpointStore(folder, 3, ranks=self.Rank(rank, world_size, box))
            mine = [Weights(rank + 10, name="own")]
            path = store.write(5, [Counter(value="shared")], metadata=METADATA, per_rank=mine)
            assert path == folder / "checkpoint-5"
            assert rank == 0 or not folder.exists(), "only rank 0 writes"
            store.close()
        return store

    def test_each_gets_its_own_state_back(self, tmp_path: Path) -> None:
        checkpoint = self.made(tmp_path / "made", 3).open(tmp_path / "made" / "checkpoint-5")
        for rank in range(3):
            own, shared = Weights(0, name="own"), Counter()
            assert checkpoint.load([shared], per_rank=[own], rank=rank, world_size=3) == ()
            assert (shared.value, own.step) == ("shared", rank + 10)
            assert own.is_right()
        assert "own.rank-00002.safetensors" in names(checkpoint.path)

    def test_another_number_of_processes_is_told(self, tmp_path: Path) -> None:
        checkpoint = self.made(tmp_path / "made", 2).open(tmp_path / "made" / "checkpoint-5")
        own = Weights(0, name="own")
        (note,) = checkpoint.load([Counter()], per_rank=[own], rank=2, world_size=3)
        assert "2 processes" in note
        assert own.step == 0


class TestFolder:
    def test_another_process_is_kept_out(self, tmp_path: Path) -> None:
        first, second = CheckpointStore(tmp_path, 5), CheckpointStore(tmp_path, 5)
        first.claim(IDENTITY)
        with pytest.raises(BusyFolderError, match="output_dir"):
            second.claim(IDENTITY)
        first.close()
        second.claim(IDENTITY)
        second.close()

    def test_another_run_is_rejected_by_name_and_nothing_is_touched(self, tmp_path: Path) -> None:
        filled(tmp_path, 3)
        before = names(tmp_path)
        store = CheckpointStore(tmp_path, 1)
        with pytest.raises(OtherRunError, match="name was 'cats' and is 'dogs'"):
            store.write(4, [Counter()], metadata=Metadata({**IDENTITY, "name": "dogs"}))
        assert names(tmp_path) == before

    def test_what_a_killed_process_left_counts_as_free_before_it_is_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left = tmp_path / temporary_name()
        left.mkdir()
        (left / "half").write_bytes(bytes(1000))
        with CheckpointStore(tmp_path, 5) as store:
            monkeypatch.setattr(store, "_free", lambda: 100)
            store.check_room(1100, IDENTITY)
            with pytest.raises(CheckpointFullError):
                store.check_room(1101, IDENTITY)
            store.claim(IDENTITY)
            assert not left.exists()
            with pytest.raises(CheckpointFullError):
                store.check_room(101)

    def test_no_room_is_told_before_anything_is_copied(self, tmp_path: Path) -> None:
        with CheckpointStore(tmp_path, 5) as store:
            write(store, 1)
            with pytest.raises(CheckpointFullError, match=r"checkpoint-1 is complete") as caught:
                store.check_room(1 << 60)
        problem = caught.value.problem
        assert "free" in problem.found
        assert problem.expected == "1048576 TiB free"
        assert "df -h" in problem.hint

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="Not a directory"):
            CheckpointStore(tmp_path / "file" / "checkpoints", 1).claim(IDENTITY)
