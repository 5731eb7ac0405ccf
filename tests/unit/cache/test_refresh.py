from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.cache.encoder import Prompt
from gracetune.cache.errors import CacheError, MissingEntryError
from gracetune.cache.keys import Key
from gracetune.cache.refresh import NICENESS, Refresher, remove_epochs
from gracetune.cache.session import Caches, build, current_epoch, needs
from gracetune.cache.store import DiskStore
from gracetune.data.media.load import Sample
from unit.cache.processes import Child
from unit.cache.tiny_runs import FLAVOURS, Run, TinyModel, Watched, contents, datasets, same
from unit.data.folders import images, write

TRANSFORMS: list[dict[str, Any]] = [{"method": "RandomBrightnessContrast", "p": 1.0}]
REFRESHED = {"transforms": TRANSFORMS, "cache_mode": "refresh_each_epoch"}


@pytest.fixture
def run(tmp_path: Path, tiny_model: TinyModel) -> Run:
    """Six images that are refreshed each epoch and three that are not; epoch 0 is built."""
    found = [
        {"path": str(write(tmp_path / "p", images(6))), "resolution": 64.0, "augmentation": REFRESHED},
        {"path": str(write(tmp_path / "q", images(3))), "resolution": 64.0},
    ]
    run = Run.of(tmp_path, "sdxl", tiny_model("sdxl", "base-1.0"), found, cache={"vae_batch_size": 1})
    run.encoders = Watched(run.encoders)
    with run.caches() as caches:
        build(run.config, run.index, run.encoders, caches)
    return run


def refresher(run: Run, epoch: int = 0) -> Refresher:
    return Refresher(run.config, run.index, run.encoders, run.folders, epoch=epoch)


def entries_of(run: Run, epoch: int) -> set[Key]:
    return {item.key for item in needs(run.config, run.index, run.encoders, run.folders, epoch=epoch, part="epoch").all}


def store_of(run: Run, epoch: int) -> Path:
    return run.folders.latents("d0", epoch)


class TestSwap:
    def test_the_next_epoch_is_ready_at_the_swap_and_the_last_is_collected_after_it(self, run: Run) -> None:
        lasting = contents(run.folders.latents("d1"), run.folders.text())
        encode = refresher(run)
        encode.prepare_next()
        with DiskStore.open(store_of(run, 0), writable=False) as reader:  # epoch 0 trains
            swap = encode.swap()
            assert (swap.epoch, encode.current) == (1, 1)
            assert contents(store_of(run, 1)).keys() == entries_of(run, 1)
            # Epoch 0 is still being read: it stays, and is removed the next time.
            assert encode.collect().in_use == (store_of(run, 0),)
            assert all(reader.read(key) for key in entries_of(run, 0))
        collected = encode.collect()
        assert collected.entries == 6
        assert collected.size > 0
        assert not store_of(run, 0).exists()
        assert contents(store_of(run, 1)).keys() == entries_of(run, 1)
        assert same(contents(run.folders.latents("d1"), run.folders.text()), lasting)

    def test_every_epoch_has_other_latents(self, run: Run) -> None:
        encode = refresher(run)
        encode.swap()
        first, second = contents(store_of(run, 0)), contents(store_of(run, 1))
        assert not first.keys() & second.keys()
        one = {tuple(entry["latents"].flatten()[:8].tolist()) for entry in first.values()}
        other = {tuple(entry["latents"].flatten()[:8].tolist()) for entry in second.values()}
        assert len(one | other) == 12

    def test_epoch_0_can_be_read_while_epoch_1_is_made(self, run: Run) -> None:
        go_on, begun = threading.Event(), threading.Event()

        def wait(requested: Sequence[Sample | Prompt]) -> None:
            begun.set()
            assert go_on.wait(30)

        run.encoders.before_encode = wait
        encode = refresher(run)
        encode.prepare_next()
        assert begun.wait(30)
        assert encode.current == 0
        assert contents(store_of(run, 0)).keys() == entries_of(run, 0)
        go_on.set()
        assert encode.swap().built.latents.encoded == 6
        assert encode.current == 1

    def test_nothing_is_swapped_when_it_could_not_be_made(self, run: Run) -> None:
        def fail(requested: Sequence[Sample | Prompt]) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        run.encoders.before_encode = fail
        encode = refresher(run)
        encode.prepare_next()
        with pytest.raises(CacheError, match="out of memory with one sample at a time"):
            encode.swap()
        assert encode.current == 0
        run.encoders.before_encode = lambda requested: None
        assert encode.swap().epoch == 1  # and the next try is a new one

    def test_tiles_are_no_way_out_beside_the_step(self, run: Run) -> None:
        """The run would not find entries under another id."""
        untiled = run.encoders.latent_id()

        def fail(requested: Sequence[Sample | Prompt]) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        run.encoders.before_encode = fail
        encode = refresher(run)
        with pytest.raises(CacheError, match=r"model\.vae_tiling=true"):
            encode.swap()
        assert run.encoders.latent_id() == untiled

    def test_the_step_comes_first(self, run: Run) -> None:
        seen: list[int] = []
        run.encoders.before_encode = lambda requested: seen.append(
            os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        )
        mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        refresher(run).swap()
        assert set(seen) == {min(19, NICENESS)}
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine

    def test_closed_in_the_middle_it_keeps_what_it_made(self, run: Run) -> None:
        begun = threading.Event()

        def slow(requested: Sequence[Sample | Prompt]) -> None:
            begun.set()
            time.sleep(0.2)

        run.encoders.before_encode = slow
        encode = refresher(run)
        encode.prepare_next()
        assert begun.wait(30)
        encode.close()
        kept = len(contents(store_of(run, 1)))
        assert 0 < kept < 6
        run.encoders.before_encode = lambda requested: None
        assert refresher(run).swap().built.latents.encoded == 6 - kept

    def test_embeddings_of_images_are_drawn_anew_too(self, tmp_path: Path, tiny_model: TinyModel) -> None:
        found = datasets("qwen_image", tmp_path, 2)
        found[0] = {**found[0], "augmentation": REFRESHED}
        run = Run.of(tmp_path, "qwen_image", tiny_model("qwen_image", FLAVOURS["qwen_image"]), found)
        with run.caches() as caches:
            build(run.config, run.index, run.encoders, caches)
        encode = refresher(run)
        swap = encode.swap()
        assert (swap.built.texts.encoded, swap.built.latents.encoded) == (2, 2)
        encode.collect()
        assert contents(store_of(run, 1)).keys() == entries_of(run, 1)
        assert not store_of(run, 0).exists()

    def test_is_rejected_where_nothing_is_drawn_anew(self, tmp_path: Path, tiny_model: TinyModel) -> None:
        with pytest.raises(ValueError, match="refresh_each_epoch"):
            refresher(Run.of(tmp_path, "sdxl", tiny_model("sdxl", "base-1.0")))


class TestCollecting:
    def test_a_run_that_keeps_nothing_takes_back_what_it_drew(self, run: Run) -> None:
        lasting = contents(run.folders.latents("d1"), run.folders.text())
        encode = refresher(run)
        encode.swap()
        encode.prepare_next()
        encode.close()
        removed = remove_epochs(encode.created)
        assert 6 <= removed.entries <= 12  # epoch 1, and what there was of epoch 2
        assert {epoch for epoch, _ in run.folders.epochs()} == {0}  # made before this run
        assert same(contents(run.folders.latents("d1"), run.folders.text()), lasting)

    def test_only_what_this_configuration_made(self, run: Run, tmp_path: Path, tiny_model: TinyModel) -> None:
        other = Run.of(tmp_path, "sdxl", tiny_model("sdxl", "base-1.0"),
                       [{"path": str(tmp_path / "p"), "resolution": 128.0, "augmentation": REFRESHED}])  # fmt: skip
        with other.caches() as caches:
            build(other.config, other.index, other.encoders, caches)
        encode = refresher(run)
        encode.swap()
        assert encode.collect().entries == 6
        assert contents(store_of(run, 0)).keys() == entries_of(other, 0)

    def test_a_file_of_somebody_else_stays(self, run: Run) -> None:
        note = write(store_of(run, 0), {"mine.txt": "do not touch"}) / "mine.txt"
        encode = refresher(run)
        encode.swap()
        encode.collect()
        assert note.read_text() == "do not touch"

    def test_what_killed_runs_left_behind(self, run: Run) -> None:
        for epoch in (1, 2, 3):
            refresher(run, epoch - 1).swap()
        assert refresher(run, 3).collect().entries == 18
        assert {epoch for epoch, _ in run.folders.epochs()} == {3}


@pytest.mark.parametrize("after", [1, 3, 5])
def test_killed_in_the_middle_nothing_is_lost(run: Run, after: int) -> None:
    """kill -9 after that many entries of epoch 1: epoch 0 stays complete, and the next start continues."""
    epoch_0 = contents(store_of(run, 0))

    def work(report: Callable[[str], None]) -> None:
        def send_progress(requested: Sequence[Sample | Prompt]) -> None:
            for _ in requested:
                report("encoding")
            time.sleep(0.02)

        run.encoders.before_encode = send_progress
        encode = refresher(run)
        encode.prepare_next()
        encode.swap()
        report("swapped")
        time.sleep(60)

    child = Child(work)
    while len(child.lines) < after:
        assert child.wait_for_word()
    child.kill()
    assert "swapped" not in child.lines
    assert same(contents(store_of(run, 0)), epoch_0)
    assert current_epoch(run.config, run.index, run.encoders, run.folders) == 0
    encode = refresher(run)
    encode.swap()
    assert contents(store_of(run, 1)).keys() == entries_of(run, 1)
    assert encode.collect().entries == 6
    with Caches(run.folders, writable=False) as caches, pytest.raises(MissingEntryError):
        caches.store(store_of(run, 1)).read(next(iter(entries_of(run, 0))))
