"""The checkpoint that a run starts from."""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from gracetune.checkpoint.errors import CheckpointError, DamagedCheckpointError, OtherRunError, ResumeError
from gracetune.checkpoint.resume import open_requested, resolve
from gracetune.checkpoint.state_parts import RandomState
from gracetune.checkpoint.store import CheckpointStore
from unit.checkpoint.states import IDENTITY, METADATA, begin, check, filled, names, write


class TestBeginning:
    def test_latest_goes_on_from_the_newest_by_number(self, tmp_path: Path) -> None:
        start = begin("latest", filled(tmp_path, 9, 10, 100), IDENTITY)
        assert start.checkpoint is not None
        check(start.checkpoint, 100)
        assert (start.step, start.notes) == (100, ())
        assert "checkpoint-100, the latest" in start.reason

    @pytest.mark.parametrize("requested", ["latest", "none"])
    def test_an_empty_or_absent_folder_begins_anew(self, tmp_path: Path, requested: str) -> None:
        with CheckpointStore(tmp_path / "new", 3) as store:
            start = begin(requested, store, IDENTITY)
            assert (start.checkpoint, start.step, start.notes) == (None, 0, ())
            assert "starts at step 0" in start.reason

    def test_half_written_ones_do_not_count(self, tmp_path: Path) -> None:
        store = filled(tmp_path, 3)
        (tmp_path / f".gracetune-{'0' * 32}.tmp").mkdir()
        assert resolve("latest", store)[0] == tmp_path / "checkpoint-3"

    def test_a_damaged_latest_is_an_error_and_never_skipped(self, tmp_path: Path) -> None:
        store = filled(tmp_path, 3, 4)
        (tmp_path / "checkpoint-4" / "manifest.json").unlink()
        with pytest.raises(DamagedCheckpointError, match=f"--resume {tmp_path / 'checkpoint-3'}"):
            begin("latest", store, IDENTITY)
        # And the command in the message works, with the damaged one out of the way, still there.
        with CheckpointStore(tmp_path, 5) as again:
            start = begin(str(tmp_path / "checkpoint-3"), again, IDENTITY)
            assert start.step == 3
            assert "set-aside-checkpoint-4" in start.notes[0]
            write(again, 4)
        assert names(tmp_path) == ["checkpoint-3", "checkpoint-4", "set-aside-checkpoint-4"]

    def test_only_looking_changes_nothing(self, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        with filled(folder, 3, 4) as store:
            write(store, 5)
        before = sorted(folder.rglob("*"))
        with CheckpointStore(folder, 1) as store:
            assert open_requested("none", store, IDENTITY).newest == 5
            assert open_requested(str(folder / "checkpoint-3"), store, IDENTITY).step == 3
            with pytest.raises(OtherRunError):
                open_requested("none", store, {**IDENTITY, "model": "another"})
        assert sorted(folder.rglob("*")) == before

    def test_beginning_anew_sets_older_checkpoints_aside_every_time(self, tmp_path: Path) -> None:
        for _ in range(2):
            with CheckpointStore(tmp_path, 1) as store:
                begin("none", store, IDENTITY)
                write(store, 3)
        with CheckpointStore(tmp_path, 1) as store:
            begin("none", store, IDENTITY)
        assert names(tmp_path) == ["set-aside-checkpoint-3", "set-aside-checkpoint-3-2"]

    def test_saving_at_once_after_resuming_writes_nothing_twice(self, tmp_path: Path) -> None:
        filled(tmp_path, 3)
        before = (tmp_path / "checkpoint-3" / "manifest.json").stat()
        with CheckpointStore(tmp_path, 1) as store:
            begin("latest", store, IDENTITY)
            write(store, 3)
        assert (tmp_path / "checkpoint-3" / "manifest.json").stat() == before

    def test_a_checkpoint_elsewhere_takes_precedence_over_one_of_the_same_step(self, tmp_path: Path) -> None:
        filled(tmp_path / "old", 3)
        filled(tmp_path / "new", 2, 3)
        with CheckpointStore(tmp_path / "new", 5) as store:
            start = begin(str(tmp_path / "old" / "checkpoint-3"), store, IDENTITY)
            assert start.step == 3
            write(store, 3)
        assert names(tmp_path / "new") == ["checkpoint-2", "checkpoint-3", "set-aside-checkpoint-3"]


class TestOtherRuns:
    OTHER: ClassVar = {"name": "dogs", "model": "wan t2v-14b"}

    def test_are_rejected_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(OtherRunError, match="name was 'cats' and is 'dogs'"):
            begin("latest", filled(tmp_path, 3), self.OTHER)
        assert names(tmp_path) == ["checkpoint-3"]

    def test_beginning_anew_in_their_folder_is_rejected_too(self, tmp_path: Path) -> None:
        with pytest.raises(OtherRunError, match="output_dir"):
            begin("none", filled(tmp_path, 3), self.OTHER)
        assert names(tmp_path) == ["checkpoint-3"]

    def test_what_the_message_says_to_type_works(self, tmp_path: Path) -> None:
        filled(tmp_path / "cats", 3)
        with CheckpointStore(tmp_path / "dogs", 3) as store:
            path = str(tmp_path / "cats" / "checkpoint-3")
            with pytest.raises(OtherRunError, match="--allow-other-run"):
                begin(path, store, self.OTHER)
            start = begin(path, store, self.OTHER, allow_other_run=True)
        assert start.step == 3
        assert start.notes == ("checkpoint-3 belongs to another run: name was 'cats' and is 'dogs'",)


class TestPaths:
    def test_a_path_may_be_relative_or_from_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = filled(tmp_path, 3)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        for requested in ("checkpoint-3", "./checkpoint-3", "~/checkpoint-3", str(tmp_path / "checkpoint-3")):
            assert resolve(requested, store)[0] == tmp_path / "checkpoint-3"

    @pytest.mark.parametrize(
        "requested", ["run", "run/checkpoints", "run/checkpoints/checkpoint-7", "checkpoint-3", "x"]
    )
    def test_what_is_no_checkpoint_gets_the_nearest_one_to_type(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requested: str
    ) -> None:
        store = filled(tmp_path / "run" / "checkpoints", 3, 5)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ResumeError) as caught:
            resolve(requested, store)
        step = 3 if requested == "checkpoint-3" else 5
        assert caught.value.problem.hint == f"--resume {tmp_path / 'run' / 'checkpoints' / f'checkpoint-{step}'}"
        assert "latest, none" in caught.value.problem.expected

    def test_a_file_or_nothing_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "a.safetensors").write_text("")
        store = CheckpointStore(tmp_path / "none", 3)
        with pytest.raises(ResumeError, match="found     a file"):
            resolve(str(tmp_path / "a.safetensors"), store)
        with pytest.raises(ResumeError, match="--resume latest"):
            resolve(str(tmp_path / "x"), store)


class TestRandomState:
    def draw(self) -> tuple[object, ...]:
        return (
            random.random(), random.gauss(0, 1), random.getrandbits(64),
            float(np.random.rand()), float(np.random.randn()),
            torch.rand(5).tolist(), torch.randn(3).tolist(), torch.randperm(9).tolist(),
        )  # fmt: skip

    @pytest.mark.parametrize("odd", [False, True])
    def test_all_generators_go_on_to_the_bit(self, tmp_path: Path, odd: bool) -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        self.draw()
        if odd:  # half of a pair of normal numbers waits in Python's, numpy's and torch's generators
            random.gauss(0, 1)
            np.random.randn()
            torch.randn(1)
        with CheckpointStore(tmp_path, 1) as store:
            store.write(1, [], metadata=METADATA, per_rank=[RandomState(torch.device("cpu"))])
            store.wait()
            expected = [self.draw() for _ in range(3)]
            assert store.open(tmp_path / "checkpoint-1").load([], per_rank=[RandomState()]) == ()
        assert [self.draw() for _ in range(3)] == expected

    def test_another_version_is_rejected(self) -> None:
        part = RandomState()
        saved = part.save()
        with pytest.raises(CheckpointError, match="version 9"):
            part.load({**saved.json, "version": 9}, saved.tensors)
