from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFont

from gracetune.data.contact_sheet import LARGEST, contact_sheet, draw_waveform, reduced, thumbnails, wrapped
from gracetune.data.index import DataIndex
from gracetune.data.refs import Bucket, Fit, SampleRef
from gracetune.models.registry import geometry
from unit.data.folders import image, index_of, write
from unit.data.media.generated import audio_bytes, every, image_bytes, tone, video_bytes

FONT = ImageFont.load_default(size=12)


def all_refs(index: DataIndex) -> list[SampleRef]:
    return list(index.cacheable())


def colours(image: Image.Image) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.asarray(image, np.float64)


class TestThumbnails:
    def test_show_what_the_model_sees_and_no_more(self, tmp_path: Path) -> None:
        """Red left, blue right, and a crop of the left half: no blue is left, and the flipped one is the opposite."""
        halves = Image.new("RGB", (200, 100), "red")
        halves.paste("blue", (100, 0, 200, 100))
        folder = write(tmp_path / "data", {"a.png": image_bytes(halves)})
        index = index_of(tmp_path, {"path": str(folder), "crop": {"enabled": True, "style": "corner"}})
        assert colours(thumbnails(index, all_refs(index)[0])[0])[..., 2].max() < 20
        index = index_of(tmp_path, {"path": str(folder), "augmentation": {"flip_x": True}})
        plain, flipped = (colours(thumbnails(index, ref)[0]) for ref in all_refs(index))
        assert plain[:, :20, 0].min() > 250
        assert flipped[:, :20, 2].min() > 250

    def test_have_the_shape_of_the_bucket(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.png": image(300, 100)})
        index = index_of(tmp_path, {"path": str(folder), "resolution": 256.0})
        ref = all_refs(index)[0]
        small = thumbnails(index, ref)[0]
        assert small.width / small.height == pytest.approx(ref.bucket.width / ref.bucket.height, rel=0.02)

    @given(st.integers(1, 9000), st.integers(1, 9000), st.integers(0, 9000), st.integers(0, 9000))
    def test_large_images_are_made_small_before_they_are_decoded(
        self, width: int, height: int, left: int, top: int
    ) -> None:
        fit = Fit((640, 480), (width + left, height + top), left, top)
        small, bucket = reduced(fit, Bucket(width, height))
        assert max(bucket.width, bucket.height) <= LARGEST
        assert small.left + bucket.width <= small.resized[0]
        assert small.top + bucket.height <= small.resized[1]
        if max(width, height) <= LARGEST:
            assert (small, bucket) == (fit, Bucket(width, height))

    def test_masked_parts_are_dark(self, tmp_path: Path) -> None:
        mask = Image.new("L", (64, 64))
        mask.paste(255, (0, 0, 32, 64))
        folder = write(tmp_path / "data", {"a.png": image_bytes(Image.new("RGB", (64, 64), "white"))})
        masks = write(tmp_path / "masks", {"a.png": image_bytes(mask)})
        index = index_of(tmp_path, {"path": str(folder), "mask": {"path": str(masks)}})
        shown = colours(thumbnails(index, all_refs(index)[0])[0])
        assert shown[:, :80].min() > 250
        assert shown[:, 110:].max() < 60

    def test_edit_pairs_stand_side_by_side(self, tmp_path: Path) -> None:
        target = {"path": str(write(tmp_path / "t", {"a.png": image()})), "conditioning": ["d1"]}
        source = {"path": str(write(tmp_path / "s", {"a.png": image(128, 64)})), "dataset_type": "conditioning"}
        index = index_of(tmp_path, target, source)
        shown = thumbnails(index, all_refs(index)[0])
        assert [round(one.width / one.height, 1) for one in shown] == [1.0, 2.0]

    def test_a_video_shows_the_first_frame_of_its_clip(self, tmp_path: Path) -> None:
        frames = [np.full((48, 64, 3), 255 * (number >= 20), np.uint8) for number in range(40)]
        folder = write(tmp_path / "data", {"a.mp4": video_bytes(every(0.04, 40), frames=frames)})
        values = {"path": str(folder), "dataset_type": "video", "video": {"num_frames": 17, "clip": "uniform"}}
        index = index_of(tmp_path, values, geometry=geometry("wan", "t2v-14b-2.2"))
        first, last = (colours(thumbnails(index, ref)[0]).mean() for ref in all_refs(index))
        assert first < 10
        assert last > 245

    def test_a_sound_shows_its_waveform(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.wav": audio_bytes(tone(440, 1.5, 44_100), 44_100)})
        values = {"path": str(folder), "dataset_type": "audio"}
        index = index_of(tmp_path, values, geometry=geometry("stable_audio", "open-1.0"))
        strip = colours(thumbnails(index, all_refs(index)[0])[0]).mean(axis=2)
        loud, silent = (strip[:, part].mean() for part in (slice(0, 150), slice(220, None)))
        assert silent - loud > 20

    def test_a_waveform_reaches_as_far_as_the_sound(self) -> None:
        half = np.zeros((1, 3_600), np.float32)
        half[:, :1_800] = np.resize([0.9, -0.9], 1_800)
        strip = np.asarray(draw_waveform(half))
        inked = (strip != 255).any(axis=2)
        assert inked[:, :170].sum(axis=0).min() > 80
        assert inked[:, 190:].sum(axis=0).max() <= 2


class TestSheets:
    def test_a_damaged_file_is_shown_as_such_and_reported(self, tmp_path: Path) -> None:
        data = bytearray(image(200, 200, kind="PNG"))
        data[300:2_000] = bytes(1_700)
        folder = write(tmp_path / "data", {"a.png": image(), "b.png": bytes(data)})
        index = index_of(tmp_path, {"path": str(folder)})
        sheet = contact_sheet(index, all_refs(index), "title", "subtitle")
        assert [one.path for one in sheet.damaged] == ["b.png"]
        assert sheet.image.width >= 640

    def test_rows_hold_as_many_as_fit(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {f"{n}.png": image(seed=n) for n in range(13)})
        index = index_of(tmp_path, {"path": str(folder)})
        heights = [contact_sheet(index, all_refs(index)[:count], "t", "s").image.height for count in (1, 6, 7, 12, 13)]
        assert heights[0] == heights[1] < heights[2] == heights[3] < heights[4]
        assert contact_sheet(index, all_refs(index), "t", "s").image.width <= 1300


class TestText:
    def test_is_wrapped_at_words(self) -> None:
        lines = wrapped("one two three four five six seven", FONT, 60, 9)
        assert " ".join(lines) == "one two three four five six seven"
        assert all(FONT.getlength(line) <= 60 for line in lines)
        assert len(lines) > 2

    def test_is_cut_after_the_last_line(self) -> None:
        lines = wrapped("word " * 50, FONT, 80, 2)
        assert len(lines) == 2
        assert lines[1].endswith("…")
        assert all(FONT.getlength(line) <= 80 for line in lines)

    def test_long_words_are_cut(self) -> None:
        for lines in (wrapped("x" * 200, FONT, 50, 3), wrapped("a " + "x" * 200 + " b", FONT, 50, 3)):
            assert all(FONT.getlength(line) <= 50 for line in lines)
            assert any(line.endswith("…") for line in lines)

    def test_nothing_is_one_empty_line(self) -> None:
        assert wrapped("", FONT, 50, 3) == [""]
