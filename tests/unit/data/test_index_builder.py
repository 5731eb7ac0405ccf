"""Building an index from folders: buckets, captions, dropped files, and every kind of bad input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from gracetune.data.backend import Backend, FileStat, LeftOut
from gracetune.data.backends.errors import StorageError, UnreadableFilesError
from gracetune.data.backends.in_memory import InMemoryBackend
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.open import attach_backend, open_backend
from gracetune.data.backends.storage import from_json, to_json
from gracetune.data.errors import DataError, UnreadableMediaError
from gracetune.data.geometry import Geometry
from gracetune.data.index import DataIndex, Exclusions, Unreadable
from gracetune.data.items import DatasetIndex
from gracetune.data.refs import Bucket
from gracetune.errors import ConfigError
from gracetune.models.registry import geometry
from unit.data.backends.helpers import staged
from unit.data.folders import image, images, index_of, made_up, write
from unit.data.media.generated import audio_bytes, every, tone, video_bytes


def only(index: DataIndex) -> DatasetIndex:
    assert len(index.datasets) == 1
    return index.datasets[0]


def paths(index: DatasetIndex) -> list[str]:
    return [item.path for item in index.items]


def note(index: DatasetIndex, words: str) -> str:
    found = [one for one in index.notes if words in one]
    assert len(found) == 1, index.notes
    return found[0]


class TestImages:
    def test_buckets_and_captions(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", images(8))
        index = only(index_of(tmp_path, {"path": str(folder)}))
        assert [item.bucket for item in index.items[:3]] == [Bucket(64, 64), Bucket(80, 48), Bucket(48, 80)]
        assert [item.captions for item in index.items[:2]] == [("picture 0",), ("picture 1",)]
        assert {item.visits for item in index.items} == {1}
        assert not index.dropped

    def test_a_folder_with_several_resolutions_is_scanned_once(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", images(4))
        message: list[str] = []
        index = index_of(
            tmp_path,
            {"path": str(folder), "resolution": 64.0},
            {"path": str(folder), "resolution": 128.0},
            on_scanned=lambda name, done, total: message.append(name),
        )
        assert set(message) == {"d0"}
        assert [item.bucket.width for item in index.datasets[1].items] == [128, 160, 112, 176]

    def test_filters_name_what_they_drop(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"small.png": image(20, 20), "wide.png": image(400, 100), "ok.png": image()})
        index = only(index_of(tmp_path, {"path": str(folder), "minimum_size": 32.0, "maximum_aspect_ratio": 2.0}))
        assert paths(index) == ["ok.png"]
        assert [(one.path, one.reason) for one in index.dropped] == [
            ("small.png", "smaller than minimum_size 32"),
            ("wide.png", "wider than maximum_aspect_ratio 2"),
        ]

    def test_repeats_are_visits(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", images(2))
        assert {item.visits for item in only(index_of(tmp_path, {"path": str(folder), "repeats": 3})).items} == {4}

    def test_max_samples_takes_the_same_ones_every_time(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", images(30))
        first = only(index_of(tmp_path, {"path": str(folder), "max_samples": 10}))
        again = only(index_of(tmp_path, {"path": str(folder), "max_samples": 10}, seed=99))
        assert len(first.items) == 10
        assert paths(first) == paths(again) != [f"{number:03}.png" for number in range(10)]
        assert {one.reason for one in first.dropped} == {"beyond max_samples 10"}
        assert len(first.dropped) == 20

    def test_held_out_files_are_not_trained_on(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", images(12))
        index = index_of(tmp_path, {"path": str(folder), "held_out": 3})
        kept, apart = only(index), index.held_out[0]
        assert (len(kept.items), len(apart.items)) == (9, 3)
        assert not {*paths(kept)} & {*paths(apart)}
        again = index_of(tmp_path, {"path": str(folder), "held_out": 3}, seed=99)
        assert paths(again.held_out[0]) == paths(apart)
        with pytest.raises(ConfigError, match="held_out"):
            index_of(tmp_path, {"path": str(folder), "held_out": 12})

    def test_enlarged_images_are_noted(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.png": image(16, 16), "b.png": image(64, 64)})
        message = note(only(index_of(tmp_path, {"path": str(folder)})), "enlarged")
        assert message.startswith("1 sample ")
        assert "a.png by 4.0x" in message

    def test_fixed_random_crops_are_noted(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", images(2))
        crop = {"enabled": True, "style": "random"}
        assert "refresh_each_epoch" in note(
            only(index_of(tmp_path, {"path": str(folder), "crop": crop})), "chosen once"
        )
        for values in ({"cache_latents": "none"}, {"augmentation": {"cache_mode": "refresh_each_epoch"}}):
            index = only(index_of(tmp_path, {"path": str(folder), "crop": crop, **values}))
            assert not [one for one in index.notes if "chosen once" in one]

    def test_names_shared_by_several_files(self, tmp_path: Path) -> None:
        folder = write(
            tmp_path / "data", {"a.png": image(), "a.jpg": image(kind="JPEG"), "a.txt": "both", "b.png": image()}
        )
        index = only(index_of(tmp_path, {"path": str(folder)}))
        assert (
            note(index, "several files") == "1 name used by several files, which share their caption: a.jpg and a.png"
        )
        assert [item.captions for item in index.items[:2]] == [("both",), ("both",)]

    def test_links_out_of_the_folder_are_counted(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.png": image()})
        (folder / "b.png").symlink_to(write(tmp_path / "elsewhere", {"b.png": image()}) / "b.png")
        assert "leads out of the folder" in note(only(index_of(tmp_path, {"path": str(folder)})), "1 file skipped")


class TestCaptions:
    def test_missing_captions_are_counted_and_named(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {**images(2), "x.png": image(), "y.png": image(), "y.txt": "\n"})
        index = only(index_of(tmp_path, {"path": str(folder)}))
        assert note(index, "without a caption") == "1 sample without a caption: x.png"
        assert note(index, "empty caption") == "1 sample with an empty caption: y.png"

    def test_a_trigger_word_is_still_there(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"x.png": image()})
        index = only(index_of(tmp_path, {"path": str(folder), "captions": {"trigger_word": "sks"}}))
        assert note(index, "without a caption") == '1 sample without a caption, trained with "sks" only: x.png'

    def test_a_placeholder_without_a_trigger_word_is_removed_and_counted(self, tmp_path: Path) -> None:
        files = {"x.png": image(), "x.txt": "a [trigger] in the rain", "y.png": image(), "y.txt": "a cat"}
        folder = write(tmp_path / "data", files)
        index = only(index_of(tmp_path, {"path": str(folder)}))
        assert note(index, "[trigger]") == (
            "1 sample with [trigger] in the caption, removed because there is no trigger_word: x.png"
        )
        named = only(index_of(tmp_path, {"path": str(folder), "captions": {"trigger_word": "sks"}}))
        assert not [one for one in named.notes if "[trigger]" in one]

    def test_a_caption_that_is_not_utf8_is_an_unreadable_file(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {**images(3), "001.txt": b"caf\xe9"})
        with pytest.raises(UnreadableFilesError, match=r"001\.txt: .*not UTF-8"):
            index_of(tmp_path, {"path": str(folder)})
        index = only(index_of(tmp_path, {"path": str(folder), "corrupt_threshold": 0.5}))
        assert paths(index) == ["000.png", "002.png"]
        assert [one.path for one in index.unreadable] == ["001.txt"]

    def test_every_caption_is_read_once_and_a_huge_one_never(self, tmp_path: Path) -> None:
        """On a server each request is a round trip; a sparse file of 5 TiB would not fit into memory."""
        folder = write(tmp_path / "data", images(6))
        with (folder / "004.txt").open("wb") as file:
            file.truncate(5 << 40)
        requested: list[str] = []

        class Requested(LocalBackend):
            def stat(self, path: str) -> FileStat:
                requested.append(path)
                return super().stat(path)

            def read(self, path: str) -> memoryview:
                requested.append(path)
                return super().read(path)

        dataset = {"path": str(folder), "corrupt_threshold": 0.5}
        index = only(index_of(tmp_path, dataset, open_backend=lambda dataset: Requested(dataset.path)))
        assert index.unreadable == (LeftOut("004.txt", "a caption file of 5.00 TiB; expected text of at most 512 KiB"),)
        assert sorted(requested) == sorted({*images(6)} - {"004.txt"})

    def test_captions_lists_every_text_of_a_run(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.png": image(), "a.txt": "one\ntwo", "b.png": image(), "b.txt": "two"})
        assert list(index_of(tmp_path, {"path": str(folder)}).captions()) == ["one", "two"]
        dropping = index_of(tmp_path, {"path": str(folder), "captions": {"dropout": 0.1}})
        assert list(dropping.captions()) == ["", "one", "two"]


class TestKohyaFolders:
    def test_numbers_are_visits_and_names_captions(self, tmp_path: Path) -> None:
        files = {"3_sks dog/a.png": image(), "1_dog/b.png": image(seed=2), "1_dog/b.txt": "own", "0_off/c.png": image()}
        index = only(index_of(tmp_path, {"path": str(write(tmp_path / "data", files))}))
        assert [(item.path, item.visits, item.captions) for item in index.items] == [
            ("1_dog/b.png", 1, ("own",)),
            ("3_sks dog/a.png", 3, ("sks dog",)),
        ]
        assert [one.reason for one in index.dropped] == ["in a folder whose number is 0"]
        assert "3_sks dog (3 visits an epoch)" in note(index, "kohya")

    def test_kohya_folders_are_plain_folders_if_configured(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"3_sks dog/a.png": image(), "0_off/c.png": image(seed=2)})
        index = only(index_of(tmp_path, {"path": str(folder), "kohya_folders": False}))
        assert [(item.visits, item.captions) for item in index.items] == [(1, ("",)), (1, ("",))]

    def test_repeats_override_the_numbers_with_a_note(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"3_sks dog/a.png": image()})
        index = only(index_of(tmp_path, {"path": str(folder), "repeats": 1}))
        assert index.items[0].visits == 2
        assert "repeats is 1" in note(index, "3_sks dog are not used")

    @pytest.mark.parametrize(
        "names", [("2023_holiday/a.png",), ("3_dog/a.png", "b.png"), ("3_dog/a.png", "cats/b.png")]
    )
    def test_other_layouts_are_ordinary_folders(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        folder = write(tmp_path / "data", {name: image(seed=number) for number, name in enumerate(names)})
        index = only(index_of(tmp_path, {"path": str(folder)}))
        assert {item.visits for item in index.items} == {1}
        assert len(index.items) == len(names)


class TestVideoAndSound:
    WAN = geometry("wan", "t2v-14b-2.2")

    def test_frames_are_part_of_the_bucket(self, tmp_path: Path) -> None:
        files = {
            "long.mp4": video_bytes(every(0.04, 30)),
            "short.mp4": video_bytes(every(0.04, 8)),
            "still.png": image(),
        }
        folder = write(tmp_path / "data", files)
        common = {"path": str(folder), "dataset_type": "video"}
        index = only(index_of(tmp_path, {**common, "video": {"num_frames": 17}}, geometry=self.WAN))
        assert [item.bucket for item in index.items] == [Bucket(80, 48, 17)]
        assert [(one.path, one.detail) for one in index.dropped] == [("short.mp4", "8 frames")]
        assert note(index, "next to the videos").startswith("left out: 1 image")
        by_length = only(index_of(tmp_path, {**common, "video": {"from_length": True}}, geometry=self.WAN))
        assert [item.bucket.frames for item in by_length.items] == [29, 5]

    def test_resampling_counts_the_frames_that_are_taken(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.mp4": video_bytes(every(0.04, 50))})  # two seconds
        for fps, fits in ((8.0, 16), (25.0, 50)):
            values = {"path": str(folder), "dataset_type": "video", "video": {"from_length": True, "fps": fps}}
            frames = only(index_of(tmp_path, values, geometry=self.WAN)).items[0].bucket.frames
            assert frames == fits - (fits - 1) % 4

    def test_audio_has_duration_buckets(self, tmp_path: Path) -> None:
        audio = geometry("stable_audio", "open-1.0")
        sounds = {f"{seconds}.wav": audio_bytes(tone(440, seconds, 8_000), 8_000) for seconds in (1.0, 3.5, 6.5, 6.9)}
        folder = write(tmp_path / "data", sounds)
        index = only(index_of(tmp_path, {"path": str(folder), "dataset_type": "audio"}, geometry=audio))
        seconds = [round(item.bucket.audio_samples / 44_100) for item in index.items]
        assert seconds == [3, 3, 6, 6]
        assert {item.bucket.audio_channels for item in index.items} == {2}
        assert "1.0.wav" in note(index, "padded with silence")


class TestBadInput:
    def test_an_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        with pytest.raises(DataError, match="the folder is empty"):
            index_of(tmp_path, {"path": str(tmp_path / "data")})

    def test_a_folder_of_something_else(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.mp4": b"x", "b.mp4": b"x", "c.txt": "x"})
        with pytest.raises(DataError, match=r"no image in .*2 x \.mp4, 1 x \.txt") as error:
            index_of(tmp_path, {"path": str(folder)})
        assert "dataset_type" in str(error.value)

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="no such folder"):
            index_of(tmp_path, {"path": str(tmp_path / "nowhere")})

    def test_one_bad_file_in_twenty_is_left_out_and_two_stop_the_run(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {**images(19), "bad1.png": b""})
        index = only(index_of(tmp_path, {"path": str(folder)}))
        assert len(index.items) == 19
        assert "bad1.png: the file is empty" in note(index, "unreadable")
        write(folder, {"bad2.png": image()[:-60]})
        with pytest.raises(UnreadableFilesError) as error:
            index_of(tmp_path, {"path": str(folder)})
        for words in ("bad1.png", "bad2.png", "2 of 21", "corrupt_threshold"):
            assert words in str(error.value)

    def test_no_file_left_lists_the_reasons(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", images(4))
        with pytest.raises(DataError, match=r"4 x smaller than minimum_size 512") as error:
            index_of(tmp_path, {"path": str(folder), "minimum_size": 512.0})
        assert "000.png" in str(error.value)

    @pytest.mark.parametrize(
        ("values", "key"),
        [
            ({"crop": {"enabled": True, "style": "face"}}, "datasets[0].crop.style"),
            ({"mask": {"path": "masks", "from_alpha": True}}, "datasets[0].mask"),
            (
                {"augmentation": {"transforms": [{"method": "Nonsense"}]}},
                "datasets[0].augmentation.transforms[0].method",
            ),
            ({"captions": {"strategy": "instanceprompt"}}, "datasets[0].captions.instance_prompt"),
        ],
    )
    def test_unsupported_settings_name_their_key(self, tmp_path: Path, values: dict[str, Any], key: str) -> None:
        folder = write(tmp_path / "data", images(2))
        with pytest.raises(ConfigError) as error:
            index_of(tmp_path, {"path": str(folder), **values})
        assert [problem.key for problem in error.value.problems] == [key]

    def test_files_damaged_at_decoding_leave_the_index(self, tmp_path: Path) -> None:
        index = index_of(tmp_path, {"path": str(write(tmp_path / "data", images(4))), "corrupt_threshold": 0.3})
        smaller = index.without({"d0": {"001.png": "damaged in the middle"}})
        assert paths(smaller.datasets[0]) == ["000.png", "002.png", "003.png"]
        assert smaller.datasets[0].unreadable[0].reason == "damaged in the middle"
        assert smaller.fingerprint != index.fingerprint
        assert index.without({"another": {"001.png": "x"}}).datasets == index.datasets
        with pytest.raises(UnreadableFilesError, match=r"003\.png"):
            smaller.without({"d0": {"003.png": "this one too"}})

    def test_a_damaged_reference_excludes_its_target(self, tmp_path: Path) -> None:
        """Both files have the same name, as in every edit dataset."""
        folders = [str(write(tmp_path / name, images(4))) for name in ("target", "source")]
        index = index_of(
            tmp_path,
            {"path": folders[0], "conditioning": ["d1"], "corrupt_threshold": 0.3},
            {"path": folders[1], "dataset_type": "conditioning"},
        )
        smaller = only(index.without({"d1": {"001.png": "damaged in the middle"}}))
        assert paths(smaller) == ["000.png", "002.png", "003.png"]
        assert smaller.unreadable == (LeftOut("001.png", "its 001.png of d1: damaged in the middle"),)


class BadDisk(LocalBackend):
    """A backend with some unreadable files."""

    def __init__(self, folder: Path, bad: set[str]) -> None:
        super().__init__(folder)
        self._bad = bad

    def read(self, path: str) -> memoryview:
        self._fail(path)
        return super().read(path)

    def open(self, path: str) -> BinaryIO:
        self._fail(path)
        return super().open(path)

    def _fail(self, path: str) -> None:
        if path in self._bad:
            raise UnreadableMediaError(path, "Input/output error")


class TestEveryBackendCountsTheSame:
    @pytest.fixture(params=["local", "in_memory", "in_memory of another process"])
    def backend_on(self, request: pytest.FixtureRequest) -> Iterator[Callable[[Path, set[str]], Backend]]:
        opened: list[InMemoryBackend] = []

        def on(folder: Path, bad: set[str]) -> Backend:
            source = BadDisk(folder, bad)
            if request.param == "local":
                return source
            opened.append(staged(source))
            if request.param == "in_memory":
                return opened[-1]
            other = attach_backend(from_json(to_json(opened[-1].handle())))
            assert isinstance(other, InMemoryBackend)
            opened.append(other)
            return other

        yield on
        for backend in opened:
            backend.close()

    def build(self, tmp_path: Path, backend: Backend, **values: Any) -> DatasetIndex:
        dataset = {"path": backend.root, "type": "in_memory", **values}
        return only(index_of(tmp_path, dataset, open_backend=lambda _: backend))

    def test_media_and_captions_by_name(self, tmp_path: Path, backend_on: Callable[[Path, set[str]], Backend]) -> None:
        folder = write(tmp_path / "data", {**images(6), "bad.png": b"", "003.txt": b"caf\xe9"})
        backend = backend_on(folder, {"001.png", "002.txt"})
        index = self.build(tmp_path, backend, corrupt_threshold=0.6)
        assert paths(index) == ["000.png", "004.png", "005.png"]
        found = [(one.path, one.reason.partition(" (")[0]) for one in index.unreadable]
        assert found == [
            ("001.png", "Input/output error"),
            ("bad.png", "the file is empty"),
            ("002.txt", "Input/output error"),
            ("003.txt", "a caption that is not UTF-8"),
        ]
        assert index.left_out == ()
        with pytest.raises(UnreadableFilesError, match=r"(?s)4 of 7.*001\.png.*bad\.png.*002\.txt.*003\.txt"):
            self.build(tmp_path, backend, corrupt_threshold=0.57)

    def test_unneeded_files_are_not_counted(
        self, tmp_path: Path, backend_on: Callable[[Path, set[str]], Backend]
    ) -> None:
        folder = write(tmp_path / "data", {**images(3), "notes.json": "{}", "clip.mp4": b"x"})
        bad = {"notes.json", "clip.mp4", "000.txt", "001.txt"}
        index = self.build(tmp_path, backend_on(folder, bad), captions={"strategy": "filename"})
        assert len(index.items) == 3
        assert index.unreadable == ()

    def test_a_caption_behind_a_link_out_of_the_folder(
        self, tmp_path: Path, backend_on: Callable[[Path, set[str]], Backend]
    ) -> None:
        """The file has a caption, so it must not be trained on without it."""
        folder = write(tmp_path / "data", {**images(3), "x.png": image(seed=9), "y.png": image(seed=10)})
        (folder / "x.txt").symlink_to(write(tmp_path / "elsewhere", {"x.txt": "a caption"}) / "x.txt")
        (folder / "y.txt").symlink_to("nothing there")
        index = self.build(tmp_path, backend_on(folder, set()), corrupt_threshold=0.5)
        assert paths(index) == ["000.png", "001.png", "002.png"]
        assert [(one.path, one.reason) for one in index.unreadable] == [
            ("x.txt", "a caption that cannot be read: a link that leads out of the folder"),
            ("y.txt", "a caption that cannot be read: a link to something that is not a readable file"),
        ]

    def test_a_folder_of_other_things(self, tmp_path: Path, backend_on: Callable[[Path, set[str]], Backend]) -> None:
        folder = write(tmp_path / "data", {"a.psd": b"x", "b.txt": "x"})
        (folder / "out.png").symlink_to("/etc/hostname")
        with pytest.raises(DataError) as rejected:
            self.build(tmp_path, backend_on(folder, set()))
        assert "1 file left out: a link that leads out of the folder" in str(rejected.value)
        assert "the folder is empty" not in str(rejected.value)


class TestOtherDatasets:
    def test_disabled_ones_are_not_opened_and_held_out_ones_not_trained_on(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", images(2))
        index = index_of(
            tmp_path,
            {"path": str(folder)},
            {"path": "/nowhere", "disabled": True},
            {"path": str(folder), "dataset_type": "eval"},
            {"path": "/nowhere", "dataset_type": "conditioning"},
        )
        assert [found.id for found in index.datasets] == ["d0"]
        assert [found.id for found in index.held_out] == ["d2"]
        assert list(index.notes) == ["dataset d3 was not read, because no dataset uses it as conditioning data"]
        assert [found.position for found in index.held_out] == [2]

    @pytest.mark.parametrize("name", ["a.png", "a.mp4"])
    def test_a_video_model_is_held_to_clips_or_stills(self, tmp_path: Path, name: str) -> None:
        content = image() if name == "a.png" else video_bytes(every(0.04, 90))
        folder = write(tmp_path / "held", {name: content})
        trained = write(tmp_path / "data", images(2))
        index = index_of(
            tmp_path,
            {"path": str(trained)},
            {"path": str(folder), "dataset_type": "eval"},
            geometry=geometry("wan", "t2v-14b-2.2"),
        )
        assert [item.path for item in index.held_out[0].items] == [name]

    def test_backends_are_opened_by_the_caller(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", images(2))
        opened: list[str] = []

        def opener(dataset: Any) -> LocalBackend:
            opened.append(dataset.id)
            return LocalBackend(dataset.path)

        index = index_of(tmp_path, {"path": str(folder), "type": "in_memory"}, open_backend=opener)
        assert opened == ["d0"]
        assert index.backend_of("d0").exists("000.png")

    def test_staged_data_gives_the_same_index(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {**images(6), "mask.me": "x"})
        masks = write(tmp_path / "masks", {"000.bmp": image(kind="BMP")})
        values = {
            "path": str(folder),
            "mask": {"path": str(masks)},
            "in_memory": {"compression": "lz4", "file_extensions": ["png"]},
        }
        local = index_of(tmp_path, values)
        staged = index_of(tmp_path, {**values, "type": "in_memory"}, open_backend=open_backend)
        assert staged.datasets[0].items == local.datasets[0].items
        assert staged.fingerprint == local.fingerprint
        assert isinstance(staged.backend_of("d0"), InMemoryBackend)
        assert isinstance(staged.backend_of("d0:masks"), InMemoryBackend)
        masked = next(ref for ref in staged.cacheable() if ref.mask is not None)
        assert staged.load(masked).mask is not None
        for backend in staged.backends.values():
            assert isinstance(backend, InMemoryBackend)
            backend.close()

    def test_a_scan_that_cannot_be_saved_is_noted(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", images(2))
        (tmp_path / "file").write_text("")
        index = index_of(tmp_path, {"path": str(folder)}, scans=tmp_path / "file" / "scan")
        assert "scans all files again" in index.notes[0]


def test_the_side_multiple_is_the_family_s(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", {"a.png": image(300, 200)})
    for multiple in (16, 32, 64):
        found = only(index_of(tmp_path, {"path": str(folder), "resolution": 250.0},
                              geometry=Geometry("image", side_multiple=multiple)))  # fmt: skip
        bucket = found.items[0].bucket
        assert bucket.width % multiple == bucket.height % multiple == 0


def test_a_table_that_says_other_sizes_is_named_and_the_files_count(tmp_path: Path) -> None:
    rows = "filename,caption,w,h\n000.png,a,64,64\n001.png,b,64,64\n"
    folder = write(tmp_path / "data", {**images(2, captions=False), "t.csv": rows})
    table = {"path": "t.csv", "width_column": "w", "height_column": "h"}
    found = only(index_of(tmp_path, {"path": str(folder), "captions": {"strategy": "csv", "table": table}}))
    assert [note for note in found.notes if "width_column" in note] == [
        "1 file whose size differs from width_column and height_column, for example 001.png: 96x64, not 64x64; "
        "the files' own sizes are used"
    ]


class TestExclusions:
    """Damaged files that are found one by one."""

    @pytest.fixture
    def applied(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many files each rebuild of the index removed."""
        counts: list[int] = []
        original = DataIndex.without

        def without(index: DataIndex, unreadable: Unreadable) -> DataIndex:
            counts.append(sum(map(len, unreadable.values())))
            return original(index, unreadable)

        monkeypatch.setattr(DataIndex, "without", without)
        return counts

    def test_the_index_is_rebuilt_once_for_all_of_them(self, applied: list[int]) -> None:
        index = made_up({"counts": (300, 200), "corrupt_threshold": 0.1}, {"counts": (100,), "corrupt_threshold": 0.1})
        bad = [(one.id, item.path) for one in index.datasets for item in one.items[::20]]
        excluded = Exclusions(index)
        for dataset, path in [*bad, *bad, ("another", "x.png")]:
            excluded.add(dataset, path, "damaged")
        assert applied == []
        smaller = excluded.apply()
        assert applied == [len(bad) + 1]
        gone = {name: {path: "damaged" for owner, path in bad if owner == name} for name in ("d0", "d1")}
        assert smaller == index.without(gone)
        assert [len(one.items) for one in smaller.datasets] == [475, 95]

    def test_the_first_file_beyond_the_threshold_raises(self, applied: list[int]) -> None:
        index = made_up({"counts": (100,), "corrupt_threshold": 0.03})
        excluded = Exclusions(index)
        for item in index.datasets[0].items[:3]:
            excluded.add("d0", item.path, "damaged")
        with pytest.raises(UnreadableFilesError, match="4 of 100"):
            excluded.add("d0", index.datasets[0].items[3].path, "damaged")
        assert applied == [4]
