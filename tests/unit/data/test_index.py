"""The description of a sample at each visit: what varies, and for how long it stays the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gracetune.data.index import DataIndex, flips, freshness
from gracetune.data.loader import EpochEnd, Loader
from gracetune.data.refs import BatchRef, SampleRef
from gracetune.models.registry import geometry
from unit.data.folders import image, images, index_of, made_up, write
from unit.data.media.generated import audio_bytes, every, number_of, tone, video_bytes

RANDOM = {"enabled": True, "style": "random"}
JITTER = {"method": "RandomBrightnessContrast", "p": 1.0}


def visits(index: DataIndex, epochs: int) -> list[list[SampleRef]]:
    """The samples of each epoch, by path and in order."""
    loader, found = Loader(index, batch_size=3), []
    for _ in range(epochs):
        samples: list[SampleRef] = []
        while isinstance(batch := loader.next_batch(), BatchRef):
            samples += batch.samples
        assert isinstance(batch, EpochEnd)
        found.append(sorted(samples, key=lambda sample: sample.path))
    return found


def lefts(samples: list[SampleRef]) -> list[int]:
    return [sample.fit.left for sample in samples if sample.fit is not None]


class TestHowLongARandomChoiceLasts:
    @pytest.mark.parametrize(
        ("values", "lasts"),
        [
            ({}, "once"),
            ({"augmentation": {"cache_mode": "static", "transforms": [JITTER]}}, "once"),
            ({"augmentation": {"cache_mode": "refresh_each_epoch"}}, "epoch"),
            ({"augmentation": {"cache_mode": "disable_cache", "transforms": [JITTER]}}, "visit"),
            ({"augmentation": {"cache_mode": "disable_cache"}}, "once"),  # without transforms there is a cache
            ({"cache_latents": "none"}, "visit"),
            ({"cache_latents": "disk"}, "once"),
        ],
    )
    def test_random_choices_last_as_long_as_the_cached_latent(
        self, tmp_path: Path, values: dict[str, Any], lasts: str
    ) -> None:
        folder = write(tmp_path / "data", {f"{n}.png": image(400, 64, seed=n) for n in range(4)})
        index = index_of(tmp_path, {"path": str(folder), "repeats": 1, "crop": RANDOM, **values})
        assert freshness(index.datasets[0].dataset) == lasts
        first, second = visits(index, 2)
        within = [lefts([s for s in first if s.path == f"{n}.png"]) for n in range(4)]
        assert all(one == other for one, other in within) == (lasts != "visit")
        # In the order of visits the crops of two epochs agree only where they were sampled once for all.
        assert (sorted(lefts(first)) == sorted(lefts(second))) == (lasts == "once")

    def test_transforms_have_the_seed_and_the_variant(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.png": image()})
        for mode, expected in (("static", [0, 0, 0]), ("refresh_each_epoch", [0, 1, 2]), ("disable_cache", [0, 1, 2])):
            values = {"path": str(folder), "augmentation": {"cache_mode": mode, "transforms": [JITTER]}}
            found = [samples[0].augmentation for samples in visits(index_of(tmp_path, values), 3)]
            assert [one.epoch for one in found] == expected
            assert {one.seed for one in found} == {7}
        plain = visits(index_of(tmp_path, {"path": str(folder)}), 1)[0][0].augmentation
        assert (plain.seed, plain.epoch, plain.transforms) == (None, 0, ())

    def test_without_a_cache_no_two_visits_are_the_same(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.png": image()})
        augmentation = {"cache_mode": "disable_cache", "transforms": [JITTER], "flip_x": True}
        index = index_of(tmp_path, {"path": str(folder), "repeats": 1, "augmentation": augmentation})
        found = [sample.augmentation for samples in visits(index, 3) for sample in samples]
        assert sorted(one.epoch for one in found) == [0, 1, 2, 3, 4, 5]
        assert len({(one.epoch % 2, one.flip_x) for one in found}) == 2


class TestReferencesThatComeAgain:
    @pytest.mark.parametrize("mode", ["static", "refresh_each_epoch", "disable_cache"])
    def test_recurring_references_are_the_same_objects(self, tmp_path: Path, mode: str) -> None:
        files: dict[str, bytes | str] = {f"{n}.png": image(400, 64, seed=n) for n in range(3)}
        files |= {f"{n}.txt": f"one of {n}\ntwo of {n}" for n in range(3)}
        values = {"captions": {"dropout": 0.3}, "crop": RANDOM, "repeats": 1, "path": str(write(tmp_path / "d", files))}
        augmentation = {"flip_x": True, "transforms": [JITTER], "cache_mode": mode}
        index = index_of(tmp_path, {**values, "augmentation": augmentation})
        together = visits(index, 6)
        assert {one.caption.dropped for epoch in together for one in epoch} == {True, False}
        for epoch, found in enumerate(together):
            loader = Loader(replace(index), batch_size=3)  # remembers nothing
            loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "consumed": 6 * epoch})
            fresh = [loader.next_batch() for _ in range(2)]
            assert sorted((one for batch in fresh if isinstance(batch, BatchRef) for one in batch.samples),
                          key=lambda sample: sample.path) == found  # fmt: skip
        every_one = [one for epoch in together for one in epoch]
        assert len({id(one) for one in every_one}) == (36 if mode == "disable_cache" else len({*every_one}))
        assert bool(index._refs) == (mode != "disable_cache"), "what never comes again is not kept"

    def test_the_number_of_kept_references_is_limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gracetune.data.index.MOST_KEPT_REFS", 4)
        index, other = made_up({"counts": [10]}), made_up({"counts": [10]})
        assert visits(index, 2) == visits(other, 2)
        assert 0 < len(index._refs) <= 4


class TestFlips:
    def test_flips_rotate_and_files_start_with_different_ones(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", images(16))
        index = index_of(tmp_path, {"path": str(folder), "augmentation": {"flip_x": True, "flip_y": True}})
        assert len(flips(index.datasets[0].dataset)) == 4
        epochs = visits(index, 4)
        for number in range(16):
            ways = [(e[number].augmentation.flip_x, e[number].augmentation.flip_y) for e in epochs]
            assert len(set(ways)) == 4
        assert len({(one.augmentation.flip_x, one.augmentation.flip_y) for one in epochs[0]}) > 1

    def test_nothing_is_flipped_unless_asked_for(self, tmp_path: Path) -> None:
        index = index_of(tmp_path, {"path": str(write(tmp_path / "data", images(4)))})
        assert not any(s.augmentation.flip_x or s.augmentation.flip_y for s in visits(index, 1)[0])


class TestClips:
    WAN = geometry("wan", "t2v-14b-2.2")

    def shown(self, tmp_path: Path, epochs: int = 1, count: int = 5, **video: Any) -> list[list[int]]:
        """The numbers of the frames of each epoch's clip."""
        folder = write(tmp_path / "data", {"a.mp4": video_bytes(every(0.04, 60), keyframe_every=6)})
        values = {"path": str(folder), "dataset_type": "video", "video": {"num_frames": count, **video}}
        index = index_of(tmp_path, {**values, "resolution": 64.0}, geometry=self.WAN)
        frames = []
        for samples in visits(index, epochs):
            pixels = index.load(samples[0]).pixels
            assert pixels is not None
            assert tuple(pixels.shape) == (3, count, 48, 80)
            frames.append([number_of(pixels[:, number].permute(1, 2, 0).numpy()) for number in range(count)])
        return frames

    def test_head(self, tmp_path: Path) -> None:
        assert self.shown(tmp_path, clip="head") == [[0, 1, 2, 3, 4]]

    def test_every_second_frame(self, tmp_path: Path) -> None:
        assert self.shown(tmp_path, clip="head", fps=12.5) == [[0, 2, 4, 6, 8]]

    def test_spread_over_the_whole_file(self, tmp_path: Path) -> None:
        assert self.shown(tmp_path, whole_clip=True) == [[6, 18, 30, 42, 54]]

    def test_uniform_walks_through_the_file_visit_after_visit(self, tmp_path: Path) -> None:
        frames = self.shown(tmp_path, epochs=12, clip="uniform")
        starts = sorted(clip[0] for clip in frames)
        assert starts == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55]
        assert all(clip == list(range(clip[0], clip[0] + 5)) for clip in frames)

    def test_single_frames(self, tmp_path: Path) -> None:
        assert sorted(self.shown(tmp_path, epochs=60, count=1, clip="uniform")) == [[number] for number in range(60)]

    def test_random_stays_where_latents_are_cached(self, tmp_path: Path) -> None:
        first, second = self.shown(tmp_path, epochs=2, clip="random")
        assert first == second
        assert first[0] > 0

    @pytest.mark.parametrize("rate", [23.976, 25.0, 30.0])
    @pytest.mark.parametrize("clip", ["head", "uniform", "random"])
    def test_every_indexed_clip_can_be_decoded(self, tmp_path: Path, rate: float, clip: str) -> None:
        """The last frame exists for any rate of the file, any requested rate and any length."""
        folder = write(tmp_path / "data", {"a.mp4": video_bytes(every(1 / rate, 31))})
        for video in (
            {"num_frames": 29},
            {"num_frames": 5, "fps": 7.3},
            *({"from_length": True, "fps": fps} for fps in (None, 4.0, 12.0, rate, 24.0, 59.94)),
        ):
            values = {"path": str(folder), "dataset_type": "video", "video": {"clip": clip, **video}}
            index = index_of(tmp_path, {**values, "cache_latents": "none", "resolution": 32.0}, geometry=self.WAN)
            for samples in visits(index, 3):
                pixels = index.load(samples[0]).pixels
                assert pixels is not None
                assert pixels.shape[1] == samples[0].bucket.frames


class TestSounds:
    @pytest.mark.parametrize(("truncation", "start"), [("beginning", 0.0), ("end", 2.0)])
    def test_which_part_is_kept(self, tmp_path: Path, truncation: str, start: float) -> None:
        folder = write(tmp_path / "data", {"a.wav": audio_bytes(tone(440, 5.0, 16_384), 16_384)})
        audio = {"truncation": truncation, "sample_rate": 16_384, "channels": 1}
        values = {"path": str(folder), "dataset_type": "audio", "audio": audio}
        index = index_of(tmp_path, values, geometry=geometry("stable_audio", "open-1.0"))
        ref = visits(index, 1)[0][0]
        assert ref.clip is not None
        assert (ref.clip.start, ref.clip.duration, ref.clip.sample_rate, ref.clip.pad) == (start, 3.0, 16_384, False)
        sound = index.load(ref).audio
        assert sound is not None
        assert tuple(sound.shape) == (1, 3 * 16_384)

    def test_short_audio_is_padded_with_silence(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.wav": audio_bytes(tone(440, 1.0, 44_100), 44_100)})
        values = {"path": str(folder), "dataset_type": "audio"}
        index = index_of(tmp_path, values, geometry=geometry("stable_audio", "open-1.0"))
        sound = index.load(visits(index, 1)[0][0]).audio
        assert sound is not None
        assert tuple(sound.shape) == (2, 131_072)
        assert float(sound[:, 44_200:].abs().max()) == 0.0


class TestWhatACacheHasToHold:
    def test_cacheable_covers_every_sample_of_a_run_once(self, tmp_path: Path) -> None:
        clips = write(tmp_path / "clips", {"a.mp4": video_bytes(every(0.04, 70))})
        stills = write(tmp_path / "stills", {f"{n}.png": image(200, 64, seed=n) for n in range(3)})
        index = index_of(
            tmp_path,
            {"path": str(stills), "crop": RANDOM, "augmentation": {"flip_x": True, "cache_mode": "refresh_each_epoch"}},
            {"path": str(clips), "dataset_type": "video", "video": {"num_frames": 17, "clip": "uniform"},
             "augmentation": {"flip_x": True}},
            {"path": str(stills), "cache_latents": "none"},
            geometry=geometry("wan", "t2v-14b-2.2"),
        )  # fmt: skip

        def latent(sample: SampleRef) -> tuple[Any, ...]:
            return (sample.dataset, sample.path, sample.fit, sample.clip, sample.augmentation)

        for epoch, samples in enumerate(visits(index, 3)):
            held = Counter(latent(sample) for sample in index.cacheable(epoch))
            assert set(held.values()) == {1}
            assert {latent(sample) for sample in samples if sample.dataset != "d2"} <= set(held)
            assert not [key for key in held if key[0] == "d2"]
            # Three images flipped or not, four clips of the video flipped or not.
            assert len(held) == 3 * 2 + 4 * 2


class TestCaptions:
    def test_are_drawn_for_the_global_index(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.png": image(), "a.txt": "one\ntwo\nthree"})
        values = {"path": str(folder), "repeats": 299, "captions": {"dropout": 0.25}}
        texts = Counter(sample.caption.text for sample in visits(index_of(tmp_path, values), 1)[0])
        assert set(texts) == {"one", "two", "three", ""}
        assert 50 <= texts[""] <= 100
        assert all(50 <= texts[text] <= 100 for text in ("one", "two", "three"))


def test_weights_are_the_dataset_s() -> None:
    index = made_up({"counts": [2], "loss_weight": 0.5})
    assert {sample.loss_weight for sample in visits(index, 1)[0]} == {0.5}
