from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.cache.encode_passes import EncodeMemoryError, PassOptions, PassProgress, Share
from gracetune.cache.encoder import Prompt
from gracetune.cache.errors import CacheBusyError, CacheError, CacheFullError
from gracetune.cache.keys import Key
from gracetune.cache.pass_worker import Claims
from gracetune.cache.required_entries import by_folder
from gracetune.cache.session import Caches, FilledCaches, build, needs, remove_entries
from gracetune.cache.store import DiskStore
from gracetune.cache.writer import Flush
from gracetune.data.backends.errors import UnreadableFilesError
from gracetune.data.index import DataIndex, Unreadable
from gracetune.data.media.load import Sample
from gracetune.errors import ConfigError
from gracetune.models.encoders import encode_options, encoders_of
from unit.cache.processes import Child, mount_tmpfs, own_mounts
from unit.cache.tiny_runs import FLAVOURS, Run, TinyModel, Watched, contents, datasets, same
from unit.data.folders import image, images, write

NAMES = {
    "wan": ({"prompt_embeds"}, {"latents"}),
    "qwen_image": ({"prompt_embeds"}, {"latents", "conditioning_latents_0"}),
    "sdxl": ({"prompt_embeds", "pooled_prompt_embeds"}, {"latents", "time_ids"}),
    "stable_audio": ({"prompt_embeds"}, {"latents", "seconds"}),
    "flux": ({"prompt_embeds", "pooled_prompt_embeds"}, {"latents"}),
    "flux2": ({"prompt_embeds"}, {"latents"}),
    "z_image": ({"prompt_embeds"}, {"latents"}),
    "krea2": ({"prompt_embeds"}, {"latents"}),
}


@pytest.fixture
def sdxl(tmp_path: Path, tiny_model: TinyModel) -> Run:
    """Eight images of four shapes."""
    found = [{"path": str(write(tmp_path / "p", images(8))), "resolution": 64.0, "corrupt_threshold": 0.2}]
    cache = {"vae_batch_size": 4, "text_encoder_batch_size": 4}
    run = Run.of(tmp_path, "sdxl", tiny_model("sdxl", "base-1.0"), found, cache=cache)
    run.encoders = Watched(run.encoders)
    return run


def built(run: Run, **options: Any) -> FilledCaches:
    with run.caches() as caches:
        return build(run.config, run.index, run.encoders, caches, **options)


def squares(run: Run, tmp_path: Path, count: int = 8) -> Run:
    """The same run with images of one shape."""
    files = {f"{number}.png": image(64, 64, seed=number) for number in range(count)}
    found = [{"path": str(write(tmp_path / "squares", dict(files))), "resolution": 64.0, "corrupt_threshold": 0.2}]
    again = Run.of(tmp_path, "sdxl", Path(str(run.config.model.path)), found, cache=run.config.cache.model_dump())
    again.encoders = run.encoders
    return again


def full_above(count: int) -> Callable[[Sequence[Sample | Prompt]], None]:
    def check(requested: Sequence[Sample | Prompt]) -> None:
        if len(requested) > count and isinstance(requested[0], Sample):
            raise torch.OutOfMemoryError("CUDA out of memory")

    return check


class TestFamilies:
    @pytest.mark.parametrize("family", FLAVOURS)
    def test_everything_a_run_wants_and_nothing_twice(self, family: str, tmp_path: Path, tiny_model: TinyModel) -> None:
        found = datasets(family, tmp_path)
        found[0] = {**found[0], "captions": {"dropout": 0.1}}
        run = Run.of(tmp_path, family, tiny_model(family, FLAVOURS[family]), found, cache={"vae_batch_size": 2})
        run.encoders = Watched(run.encoders)
        first = built(run)
        texts, latents = NAMES[family]
        folders = by_folder(needs(run.config, run.index, run.encoders, run.folders).all)
        stored = contents(*folders)
        assert stored.keys() == run.keys()
        assert first.encoded == len(stored)
        for item in needs(run.config, run.index, run.encoders, run.folders).texts:
            assert texts <= stored[item.key].keys()
        for item in needs(run.config, run.index, run.encoders, run.folders).latents:
            assert latents <= stored[item.key].keys()
        # The text encoder is freed before the other is loaded.
        assert run.encoders.loaded == ["text", "text closed", "latents", "latents closed"]
        second = built(run)
        assert (second.encoded, len(run.encoders.loaded)) == (0, 4)
        assert second.latents.encoder == first.latents.encoder

    def test_an_entry_is_what_the_encoder_makes_of_the_sample_alone(self, sdxl: Run) -> None:
        built(sdxl)
        encoder = sdxl.encoders.load_latents()
        wanted = needs(sdxl.config, sdxl.index, sdxl.encoders, sdxl.folders)
        stored = contents(sdxl.folders.latents("d0"), sdxl.folders.text())
        for item in wanted.latents:
            (alone,) = encoder.encode([sdxl.index.load(item.ref)])
            for name, tensor in alone.items():
                torch.testing.assert_close(stored[item.key][name], tensor, rtol=1e-5, atol=1e-6)
        text = sdxl.encoders.load_text()
        for one in wanted.texts:
            (alone,) = text.encode([Prompt(one.text)])
            torch.testing.assert_close(stored[one.key]["prompt_embeds"], alone["prompt_embeds"], rtol=1e-4, atol=1e-5)

    def test_images_of_an_edit_pair_decide_its_embedding(self, tmp_path: Path, tiny_model: TinyModel) -> None:
        found = datasets("qwen_image", tmp_path)
        found[0] = {**found[0], "captions": {"strategy": "instanceprompt", "instance_prompt": "make it red"}}
        run = Run.of(tmp_path, "qwen_image", tiny_model("qwen_image", "edit-2509"), found)
        built(run)
        embedded = [entry["prompt_embeds"] for entry in contents(run.folders.text()).values()]
        assert len(embedded) == 3  # one caption, three images
        assert not torch.equal(embedded[0], embedded[1])


class TestBatches:
    def test_are_of_one_shape_and_no_larger_than_asked_for(self, sdxl: Run) -> None:
        shapes: list[set[Any]] = []
        sdxl.encoders.before_encode = lambda requested: shapes.append(
            {one.ref.bucket for one in requested if isinstance(one, Sample)}
        )
        built(sdxl)
        assert all(len(found) <= 1 for found in shapes)
        assert {len(found) for found in shapes} == {0, 1}
        assert sum(sdxl.encoders.batches) == 8 + 8
        assert max(sdxl.encoders.batches) == 4

    def test_progress_ends_where_everything_is_done(self, sdxl: Run) -> None:
        seen: list[PassProgress] = []
        built(sdxl, on_latents=seen.append)
        assert [one.done for one in seen] == sorted({one.done for one in seen})
        assert seen[-1].done == 8
        assert {one.total for one in seen} == {8}
        assert all(one.per_second and one.seconds_left is not None for one in seen)
        assert seen[-1].seconds_left == 0

    def test_out_of_memory_halves_the_batch_and_goes_on(self, sdxl: Run, tmp_path: Path) -> None:
        run = squares(sdxl, tmp_path)
        run.encoders.before_encode = full_above(1)
        found = built(run)
        assert found.latents.encoded == 8
        assert run.encoders.batches[-8:] == [1] * 8
        assert found.latents.batch_size == 1
        assert any("out of memory with batches of 4, so batches of 1 were used" in note for note in found.notes)
        assert contents(run.folders.latents("d0"), run.folders.text()).keys() == run.keys()

    def test_smaller_images_keep_the_larger_batch(self, tmp_path: Path, tiny_model: TinyModel) -> None:
        small = {f"s{number}.png": image(64, 64, seed=number) for number in range(4)}
        large = {f"l{number}.png": image(128, 128, seed=9 + number) for number in range(4)}
        found = [{"path": str(write(tmp_path / "s", dict(small))), "resolution": 64.0},
                 {"path": str(write(tmp_path / "l", dict(large))), "resolution": 128.0}]  # fmt: skip
        cache = {"vae_batch_size": 4}
        run = Run.of(tmp_path, "sdxl", tiny_model("sdxl", "base-1.0"), found, cache=cache)

        def check(requested: Sequence[Sample | Prompt]) -> None:
            if isinstance(requested[0], Sample) and requested[0].ref.bucket.width == 128:
                full_above(2)(requested)

        run.encoders = Watched(run.encoders, before_encode=check)
        assert built(run).latents.encoded == 8
        assert run.encoders.batches[-3:] == [2, 2, 4]

    def test_then_slices_then_tiles_under_another_id(self, sdxl: Run) -> None:
        requested: list[int] = []
        sdxl.encoders.on_save_memory = lambda: requested.append(1)

        def check(samples: Sequence[Sample | Prompt]) -> None:
            # Two shapes fit; the third needs slices and tiles.
            if isinstance(samples[0], Sample) and samples[0].ref.bucket.width != samples[0].ref.bucket.height:
                full_above(0 if len(requested) < 2 else 9)(samples)

        sdxl.encoders.before_encode = check
        untiled = sdxl.encoders.latent_id()
        found = built(sdxl)
        assert len(requested) == 2
        assert dict(found.latents.encoder.settings)["tiling"] == "yes"
        assert found.latents.encoder != untiled
        tiled = replace(sdxl.encoders.inner, options=replace(sdxl.encoders.inner.options, tiling=True))
        assert tiled.latent_id() == found.latents.encoder
        wanted = needs(sdxl.config, sdxl.index, tiled, sdxl.folders)
        assert {item.key for item in wanted.latents} <= contents(sdxl.folders.latents("d0")).keys()
        assert any("tiling: yes" in note and "model.vae_tiling: true" in note for note in found.notes)

    def test_tiles_are_remembered_until_they_are_forgotten(self, sdxl: Run) -> None:
        requested: list[int] = []
        sdxl.encoders.on_save_memory = lambda: requested.append(1)
        sdxl.encoders.before_encode = lambda samples: full_above(0 if len(requested) < 2 else 9)(samples)
        untiled = sdxl.encoders.latent_id()
        first = built(sdxl)
        assert sdxl.encoders.latent_id() == first.latents.encoder != untiled  # in this process too

        def start() -> Watched:
            return Watched(encoders_of(sdxl.config, torch.device("cpu")))

        sdxl.encoders = start()
        second = built(sdxl)
        assert (second.encoded, sdxl.encoders.loaded) == (0, [])
        assert second.latents.encoder == first.latents.encoder
        assert any("in tiles, because in an earlier run one sample of bucket" in note for note in second.notes)
        sdxl.encoders.forget_tiling()
        sdxl.encoders = start()
        assert sdxl.encoders.latent_id() == untiled
        assert built(sdxl).latents.encoded == 8
        assert sdxl.encoders.tiling_note() is None

    def test_no_tiles_where_they_may_not_be(self, sdxl: Run) -> None:
        sdxl.encoders.before_encode = full_above(0)
        with pytest.raises(EncodeMemoryError, match=r"(?s)made without tiling.*model\.vae_tiling=true"):
            built(sdxl, options=PassOptions(may_tile=False))
        assert contents(sdxl.folders.latents("d0")) == {}

    def test_and_says_which_bucket_when_nothing_helps(self, sdxl: Run) -> None:
        sdxl.encoders.before_encode = full_above(0)
        with pytest.raises(EncodeMemoryError, match=r"bucket \d+x\d+ \(\d+\.png of d0\)"):
            built(sdxl)
        assert sdxl.encoders.loaded[-1] == "latents closed"
        assert len(contents(sdxl.folders.text())) == 8  # the captions stay

    def test_a_text_that_does_not_fit(self, sdxl: Run) -> None:
        def check(requested: Sequence[Sample | Prompt]) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        sdxl.encoders.before_encode = check
        with pytest.raises(EncodeMemoryError, match=r"one text .'picture"):
            built(sdxl)

    def test_numbers_that_are_none_are_never_kept(self, sdxl: Run) -> None:
        inner = sdxl.encoders.load_latents

        class Broken:
            def __init__(self) -> None:
                self._inner = inner()
                self.id, self.save_memory, self.close = self._inner.id, self._inner.save_memory, self._inner.close

            def encode(self, samples: Sequence[Sample]) -> Any:
                entries = self._inner.encode(samples)
                entries[0]["latents"][0, 0, 0] = float("nan")
                return entries

        sdxl.encoders.load_latents = Broken
        with pytest.raises(CacheError, match=r"(?s)latents of .*non-finite values"):
            built(sdxl)
        assert contents(sdxl.folders.latents("d0")) == {}


def spoil(file: Path) -> None:
    """Damage a file such that header and end stay intact, so only decoding fails."""
    raw = bytearray(file.read_bytes())
    middle = raw.index(b"IDAT") + 40
    raw[middle : middle + 40] = bytes(40)
    file.write_bytes(raw)


class TestDamagedFiles:
    def test_are_left_out_by_name(self, sdxl: Run, tmp_path: Path) -> None:
        spoil(tmp_path / "p" / "002.png")
        run = Run.of(tmp_path, "sdxl", Path(str(sdxl.config.model.path)), [sdxl.config.datasets[0].model_dump()])
        found = built(run)
        assert [(one.dataset, one.path) for one in found.latents.damaged] == [("d0", "002.png")]
        assert found.latents.encoded == 7
        assert "002.png" not in {item.path for item in found.index.datasets[0].items}
        assert any(note.startswith("left out, unreadable: 002.png of d0:") for note in found.notes)

    def test_are_counted_once_and_what_was_there_rightly(self, sdxl: Run, tmp_path: Path) -> None:
        spoil(tmp_path / "p" / "002.png")
        flipped = {**sdxl.config.datasets[0].model_dump(), "augmentation": {"flip_x": True}}
        run = Run.of(tmp_path, "sdxl", Path(str(sdxl.config.model.path)), [flipped])
        first, second = built(run).latents, built(run).latents
        assert (first.wanted, first.encoded, first.found_before, len(first.damaged)) == (16, 14, 0, 1)
        assert (second.wanted, second.encoded, second.found_before, len(second.damaged)) == (16, 0, 14, 1)

    def test_are_taken_out_of_the_index_together(
        self, sdxl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One update of the index takes time proportional to its samples, so there must be only one."""
        for name in ("001.png", "002.png", "005.png"):
            spoil(tmp_path / "p" / name)
        lenient = {**sdxl.config.datasets[0].model_dump(), "corrupt_threshold": 0.5}
        run = Run.of(tmp_path, "sdxl", Path(str(sdxl.config.model.path)), [lenient])
        taken: list[int] = []
        original = DataIndex.without

        def without(index: DataIndex, unreadable: Unreadable) -> DataIndex:
            taken.append(sum(map(len, unreadable.values())))
            return original(index, unreadable)

        monkeypatch.setattr(DataIndex, "without", without)
        assert built(run).latents.encoded == 5
        assert taken == [3]

    def test_too_many_stop_it_with_the_list(self, sdxl: Run, tmp_path: Path) -> None:
        for name in ("001.png", "002.png"):
            spoil(tmp_path / "p" / name)
        run = Run.of(tmp_path, "sdxl", Path(str(sdxl.config.model.path)), [sdxl.config.datasets[0].model_dump()])
        with pytest.raises(UnreadableFilesError, match=r"(?s)2 of 8.*00[12]\.png"):
            built(run)

    def test_an_entry_with_a_wrong_byte_is_made_again_and_no_other(self, sdxl: Run) -> None:
        built(sdxl)
        before = contents(sdxl.folders.latents("d0"))
        (shard,) = (sdxl.folders.latents("d0") / "shards").glob("*.safetensors")
        raw = bytearray(shard.read_bytes())
        raw[-200] ^= 1
        shard.write_bytes(raw)
        sdxl.encoders.encoded.clear()
        found = built(sdxl, check=True)
        assert found.latents.encoded == len(sdxl.encoders.encoded) == 1
        assert any("1 damaged entry was encoded again" in note for note in found.notes)
        assert same(contents(sdxl.folders.latents("d0")), before)
        assert built(sdxl, check=True).encoded == 0

    def test_entries_under_a_damaged_header_are_made_again(self, sdxl: Run) -> None:
        built(sdxl)
        with DiskStore.open(sdxl.folders.latents("d0"), writable=True) as store:
            store.save_index()
        (shard,) = (sdxl.folders.latents("d0") / "shards").glob("*.safetensors")
        raw = bytearray(shard.read_bytes())
        raw[300] ^= 1
        shard.write_bytes(raw)
        checked: list[tuple[int, int]] = []
        found = built(sdxl, check=True, on_checked=lambda done, total: checked.append((done, total)))
        assert found.latents.encoded == 8
        assert any("8 damaged entries were encoded again" in note for note in found.notes)
        assert checked[-1][0] == checked[-1][1] > 0
        assert built(sdxl, check=True).encoded == 0


class TestLongCaptions:
    def test_are_told_in_one_note_with_the_first_three_files(
        self, tmp_path: Path, tiny_model: TinyModel, capfd: pytest.CaptureFixture[str]
    ) -> None:
        files: dict[str, bytes | str] = {}
        for number in range(20):
            files |= {f"{number:02}.png": image(64, 64, seed=number), f"{number:02}.txt": f"picture {number}"}
        files |= {f"{number:02}.txt": f"picture {number} " * 20 for number in range(3, 15)}
        found = [{"path": str(write(tmp_path / "p", files)), "resolution": 64.0}]
        prompts = {"prompts": [{"prompt": "a validation prompt " * 30}], "every_steps": 5}
        run = Run.of(tmp_path, "sdxl", tiny_model("sdxl", "base-1.0"), found, validation=prompts)
        notes = [note for note in built(run).notes if "tokens" in note]
        assert notes == [
            "captions longer than 77 tokens are truncated: 12 samples: "
            "03.png, 04.png, 05.png and 9 more; 1 validation prompt"
        ]
        assert "truncated" not in capfd.readouterr().err
        assert [note for note in built(run).notes if "tokens" in note] == [], "nothing was encoded"


class TestInterrupted:
    def test_what_is_done_is_kept(self, sdxl: Run) -> None:
        def check(requested: Sequence[Sample | Prompt]) -> None:
            if isinstance(requested[0], Sample) and len(sdxl.encoders.batches) == 3:
                raise KeyboardInterrupt

        sdxl.encoders.before_encode = check
        with pytest.raises(KeyboardInterrupt):
            built(sdxl)
        kept = len(contents(sdxl.folders.latents("d0")))
        assert kept == sdxl.encoders.batches[2] > 0
        sdxl.encoders.before_encode = lambda requested: None
        assert built(sdxl).latents.encoded == 8 - kept

    def test_stopped_by_another_thread(self, sdxl: Run) -> None:
        stop = threading.Event()
        sdxl.encoders.before_encode = lambda requested: stop.set() if isinstance(requested[0], Sample) else None
        found = built(sdxl, options=PassOptions(stop=stop))
        assert not found.latents.complete
        assert 0 < found.latents.encoded < 8

    def test_a_run_may_take_back_what_it_added(self, sdxl: Run) -> None:
        built(sdxl)
        kept = contents(sdxl.folders.latents("d0"))
        write(Path(sdxl.config.datasets[0].path), {"new.png": image(64, 64, seed=77)})
        more = Run.of(sdxl.folders.base.parent.parent, "sdxl", Path(str(sdxl.config.model.path)),
                      [sdxl.config.datasets[0].model_dump()])  # fmt: skip
        with more.caches() as caches:
            build(more.config, more.index, more.encoders, caches)
            added = caches.created
        assert remove_entries(added).entries == 2  # its latents, and the empty caption
        assert same(contents(sdxl.folders.latents("d0")), kept)

    def test_several_ranks_take_back_what_all_of_them_added(self, sdxl: Run) -> None:
        with sdxl.caches() as mine, sdxl.caches() as other:
            build(sdxl.config, sdxl.index, sdxl.encoders, mine, options=PassOptions(stop=(stop := threading.Event())),
                  on_latents=lambda _: stop.set())  # fmt: skip
            build(sdxl.config, sdxl.index, sdxl.encoders, other)
            with pytest.raises(CacheBusyError):
                remove_entries(mine.created)
            shares = [mine.created, other.created]
        latents = sdxl.folders.latents("d0")
        assert all(0 < len(share[latents]) < 8 for share in shares)
        folders = {folder for share in shares for folder in share}
        removed = remove_entries({folder: frozenset().union(*(share.get(folder, ()) for share in shares))
                                  for folder in folders})  # fmt: skip
        assert removed.entries == 16
        assert contents(latents, sdxl.folders.text()) == {}


class TestRoom:
    def test_is_checked_when_the_size_of_entries_is_known(self, sdxl: Run, tmp_path: Path) -> None:
        """A real small disk: 200 entries of about 1.1 KiB do not fit, which is reported after the first batch."""
        files = {f"{number}.png": image(64, 64, seed=number) for number in range(200)}
        folder = write(tmp_path / "many", dict(files))
        found = [{"path": str(folder), "resolution": 64.0, "captions": {"strategy": "filename"}}]
        cache = {"cache_dir": str(tmp_path / "disk"), "text_cache_dir": str(tmp_path / "text")}
        run = Run.of(
            tmp_path, "sdxl", Path(str(sdxl.config.model.path)), found, cache={**cache, "text_encoder_batch_size": 8}
        )
        run.encoders = Watched(run.encoders)

        def work(report: Callable[[str], None]) -> None:
            own_mounts()
            mount_tmpfs(tmp_path / "disk", 128 * 1024)
            with run.caches() as caches:
                try:
                    build(run.config, run.index, run.encoders, caches)
                except CacheFullError as error:
                    report(str(error))
                    report(str(run.encoders.batches.count(4)))

        message, batches = Child(work).join()
        assert re.search(r"found +\d+ KiB free\n.*expected +\d+ KiB free", message), message
        assert batches == "1"


# -- several processes ------------------------------------------------------------------------------------------------


def rank(run: Run, number: int, world_size: int, *, nap: float = 0.0) -> Child:
    """A separate process that reports what it encodes, before it does so."""

    def work(report: Callable[[str], None]) -> None:
        def send_progress(requested: Sequence[Sample | Prompt]) -> None:
            time.sleep(nap)
            for one in requested:
                report(one.text if isinstance(one, Prompt) else one.ref.path)

        run.encoders.before_encode = send_progress
        found = built(run, options=PassOptions(share=Share(number, world_size)))
        report(f"done {found.latents.encoded} {found.latents.by_others} {found.texts.encoded} {found.texts.by_others}")

    return Child(work)


def encoded_by(stated: list[str]) -> list[str]:
    return [word for word in stated if not word.startswith("done")]


class TestRanks:
    def test_share_the_work_without_overlap(self, sdxl: Run, tmp_path: Path) -> None:
        run = squares(sdxl, tmp_path, 24)
        children = [rank(run, number, 2, nap=0.2) for number in range(2)]
        stated = [child.join() for child in children]
        work = [encoded_by(one) for one in stated]
        assert sorted([*work[0], *work[1]]) == sorted(["", *(f"{number}.png" for number in range(24))])
        assert all(any(word.endswith(".png") for word in one) for one in work)
        assert contents(run.folders.latents("d0"), run.folders.text()).keys() == run.keys()
        for one in stated:  # each returns only when everything is there
            encoded, others = (int(word) for word in one[-1].split()[1:3])
            assert encoded + others == 24

    def test_a_slow_one_gets_less(self, sdxl: Run, tmp_path: Path) -> None:
        run = squares(sdxl, tmp_path, 40)
        slow, fast = rank(run, 0, 2, nap=0.4), rank(run, 1, 2, nap=0.01)
        counts = [len(encoded_by(child.join())) for child in (slow, fast)]
        assert counts[0] < counts[1]
        assert sum(counts) == 41

    def test_of_one_that_was_killed_nothing_is_missing(self, sdxl: Run, tmp_path: Path) -> None:
        run = squares(sdxl, tmp_path, 24)
        doomed = rank(run, 0, 2, nap=0.05)
        while not any(word.endswith(".png") for word in doomed.lines):
            assert doomed.wait_for_word()
        survivor = rank(run, 1, 2)
        doomed.kill()
        survivor.join()
        assert contents(run.folders.latents("d0"), run.folders.text()).keys() == run.keys()

    def test_strangers_that_build_at_once_make_one_complete_cache(self, sdxl: Run, tmp_path: Path) -> None:
        run = squares(sdxl, tmp_path, 24)
        children = [rank(run, 0, 1, nap=0.02) for _ in range(2)]
        work = [encoded_by(child.join()) for child in children]
        assert len(work[0]) + len(work[1]) == 25
        alone = replace(run, folders=replace(run.folders, base=tmp_path / "alone", text_base=tmp_path / "alone"))
        built(alone)
        assert same(contents(run.folders.latents("d0")), contents(alone.folders.latents("d0")))

    def test_a_damaged_file_is_found_by_each(self, sdxl: Run, tmp_path: Path) -> None:
        spoil(tmp_path / "p" / "002.png")
        run = Run.of(tmp_path, "sdxl", Path(str(sdxl.config.model.path)), [sdxl.config.datasets[0].model_dump()])

        def work(number: int) -> Child:
            def do(report: Callable[[str], None]) -> None:
                found = built(run, options=PassOptions(share=Share(number, 2)))
                report(str(len(found.index.datasets[0].items)))

            return Child(do)

        assert [child.join() for child in [work(0), work(1)]] == [["7"], ["7"]]


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.full)])
def test_killed_again_and_again_no_more_than_a_flush_is_encoded_twice(sdxl: Run, tmp_path: Path, kills: int) -> None:
    """kill -9 at random moments. Each process reports what it encodes, before it does so."""
    run = squares(sdxl, tmp_path, 40)
    flush, draw = Flush(entries=4), random.Random(kills)
    stated: list[str] = []
    at_most = 0

    def work(report: Callable[[str], None]) -> None:
        def send_progress(requested: Sequence[Sample | Prompt]) -> None:
            time.sleep(0.01)
            for one in requested:
                report(one.text if isinstance(one, Prompt) else one.ref.path)

        run.encoders.before_encode = send_progress
        built(run, options=PassOptions(flush=flush))
        report("done")

    for _ in range(kills):
        child = Child(work)
        words = draw.randint(1, 12)
        while len(child.lines) < words and child.wait_for_word():
            pass
        time.sleep(draw.random() * 0.02)
        child.kill()
        stated += child.lines
        # What waits for its flush, and the batch that was being encoded.
        at_most += 4 + 4
    stated += Child(work).join()
    names = [word for word in stated if word != "done"]
    assert len(names) <= len({*names}) + at_most
    assert contents(run.folders.latents("d0"), run.folders.text()).keys() == run.keys()
    assert built(run, check=True).encoded == 0


class TestClaims:
    def test_end_with_their_process(self, tmp_path: Path) -> None:
        key, other = Key("0" * 32), Key("f" * 32)

        def work(report: Callable[[str], None]) -> None:
            claims = Claims(store)
            assert claims.take(key)
            report("claimed")
            signal.pause()

        with DiskStore.open(tmp_path / "c", writable=True) as store:
            child = Child(work)
            assert child.wait_for_word()
            with Claims(store) as claims:
                assert not claims.take(key)
                assert claims.take(other)
                child.kill()
                assert claims.take(key)
                claims.release([key])
                assert claims.take(key)


# -- memory -----------------------------------------------------------------------------------------------------------

M_MMAP_THRESHOLD = -3
"""Of malloc.h."""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def captions(run: Run, folder: Path) -> None:
    """Encode the captions, which is the first half of a build."""
    stop = threading.Event()
    with Caches(replace(run.folders, base=folder, text_base=folder), writable=True) as caches:
        found = build(
            run.config, run.index, run.encoders, caches, options=PassOptions(stop=stop), on_text=lambda _: stop.set()
        )
    assert (found.texts.encoded, found.latents.encoded) == (1, 0)


def test_the_text_encoders_memory_is_returned(tmp_path: Path, tiny_model: TinyModel) -> None:
    """Weights of 80 MB, in a separate process."""
    import shutil

    from transformers import UMT5Config, UMT5EncoderModel

    model = tmp_path / "model"
    shutil.copytree(tiny_model("wan", FLAVOURS["wan"]), model)
    settings = UMT5Config.from_pretrained(model / "text_encoder")
    settings.d_model, settings.d_ff, settings.num_layers = 1024, 3072, 4
    UMT5EncoderModel(settings).save_pretrained(model / "text_encoder")
    size = (model / "text_encoder" / "model.safetensors").stat().st_size
    assert size > 50e6
    training = {"max_steps": 1, "mixed_precision": "bf16"}
    run = Run.of(tmp_path, "wan", model, datasets("wan", tmp_path, 1), training=training)
    run.encoders = Watched(run.encoders)

    def work(report: Callable[[str], None]) -> None:
        # Every weight in pages of its own: the C library keeps none that were given back, and has none to hand out.
        assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
        captions(run, tmp_path / "first")  # libraries get ready once and stay
        before, used = resident(), []
        run.encoders.before_encode = lambda requested: used.append(resident() - before)
        for number in range(3):
            captions(run, tmp_path / f"again-{number}")
        report(f"{max(used)} {resident() - before}")

    used, left = (int(word) for word in Child(work).join()[0].split())
    assert used > 0.4 * size  # half of the file's 32 bits
    assert left < 0.2 * size, f"{left / 1e6:.0f} MB stayed"  # three came and went; one that is kept is 0.5 x size


def test_clips_of_a_run_agree_on_their_first_frame(tmp_path: Path, tiny_model: TinyModel) -> None:
    clips = datasets("wan", tmp_path)[0]
    both = [clips, {**clips, "video": {"num_frames": 5, "image_to_video": True}}]
    with pytest.raises(ConfigError, match=r"datasets\[d0\] false, datasets\[d1\] true"):
        Run.of(tmp_path, "wan", tiny_model("wan", FLAVOURS["wan"]), both)
    both[1]["resolution"] = 64.0
    run = Run.of(tmp_path, "wan", tiny_model("wan", "ti2v-5b-2.2"), both[1:], flavour="ti2v-5b-2.2")
    assert encode_options(run.config).image_to_video
    built(run)
    assert all("condition" in entry for entry in contents(run.folders.latents("d0")).values())
