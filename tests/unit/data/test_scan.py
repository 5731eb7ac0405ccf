from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import xxhash

from gracetune.config.dataset_config import Dataset, InMemory
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.open import open_backend
from gracetune.data.media import Kind
from gracetune.data.media.probe import AudioFacts, ImageFacts, VideoFacts
from gracetune.data.media_files import examine
from gracetune.data.scan import SCAN_VERSION, SavedScan, Scan, scan
from unit.data.backends.helpers import this_machine
from unit.data.folders import image, images, write
from unit.data.media.generated import DictBackend, audio_bytes, every, png, tone, video_bytes


class CountingBackend(LocalBackend):
    """Records which files were opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: list[str] = []

    def read(self, path: str) -> memoryview:
        self.opened.append(path)
        return super().read(path)


def remembered(folder: Path, tmp_path: Path, kind: Kind = "image") -> tuple[Scan, list[str]]:
    backend = CountingBackend(folder)
    found = scan(backend, kind, saved=SavedScan(tmp_path / "scans", backend.root, kind))
    return found, sorted(backend.opened)


class TestWhatIsFound:
    def test_properties_and_digests_of_each_kind(self, tmp_path: Path) -> None:
        sound = audio_bytes(tone(440, 1.5, 8_000), 8_000)
        clip = video_bytes(every(0.04, 10))
        folder = write(tmp_path / "data", {"a/1.PNG": image(80, 48), "b.mp4": clip, "c.wav": sound, "a/1.txt": "x"})
        images, videos, sounds = (scan(LocalBackend(folder), kind) for kind in ("image", "video", "audio"))
        assert images.files[0].facts == ImageFacts(80, 48, False)
        assert images.files[0].path == "a/1.PNG"
        assert images.files[0].digest == xxhash.xxh3_128_hexdigest(image(80, 48))
        assert isinstance(videos.files[0].facts, VideoFacts)
        assert videos.files[0].facts.frames == 10
        assert videos.files[0].digest == xxhash.xxh3_128_hexdigest(clip)
        assert sounds.files[0].facts == AudioFacts(8_000, 1, 12_000)
        assert images.others == {".mp4": 1, ".txt": 1, ".wav": 1}

    def test_results_are_sorted_by_path(self, tmp_path: Path) -> None:
        folder = write(tmp_path, images(40))
        found = scan(LocalBackend(folder), "image", workers=8)
        assert [file.path for file in found.files] == [f"{number:03}.png" for number in range(40)]

    def test_hidden_files_are_not_data(self, tmp_path: Path) -> None:
        folder = write(tmp_path, {"a.png": image(), "._a.png": b"resource fork", ".cache/b.png": image()})
        found = scan(LocalBackend(folder), "image")
        assert [file.path for file in found.files] == ["a.png"]
        assert found.others == {"hidden": 2}
        assert not found.unreadable

    def test_extensions_can_be_narrowed(self, tmp_path: Path) -> None:
        folder = write(tmp_path, {"a.png": image(), "b.jpg": image(kind="JPEG")})
        assert [file.path for file in scan(LocalBackend(folder), "image", extensions=[".JPG"]).files] == ["b.jpg"]

    def test_progress_ends_at_the_total(self, tmp_path: Path) -> None:
        message: list[tuple[int, int]] = []
        scan(LocalBackend(write(tmp_path, images(5))), "image", on_scanned=lambda *now: message.append(now))
        assert message[0] == (0, 5)
        assert message[-1] == (5, 5)

    def test_staged_data_is_not_hashed_again(self) -> None:
        class Staged(DictBackend):
            def digest(self, path: str) -> str | None:
                return "f" * 32 if path == "a.png" else None

        found = scan(Staged({"a.png": image(), "b.png": image()}), "image")
        assert [file.digest for file in found.files] == ["f" * 32, xxhash.xxh3_128_hexdigest(image())]


class TestBadFiles:
    @pytest.mark.parametrize(
        ("name", "content", "reason"),
        [
            ("a.png", b"", "empty (0 bytes)"),
            ("a.jpg", b"not a picture at all", "not an image"),
            ("a.png", image()[:-60], "truncated"),
            ("a.jpg", image(400, 300, kind="JPEG")[:-500], "truncated"),
            ("a.png", png(10_000, 10_000, 8, 2, b""), "100.0 megapixels"),
        ],
        ids=["empty", "no picture", "cut-off PNG", "cut-off JPEG", "bomb"],
    )
    def test_each_is_named_with_its_reason(self, tmp_path: Path, name: str, content: bytes, reason: str) -> None:
        found = scan(LocalBackend(write(tmp_path, {name: content, "good.png": image()})), "image")
        assert [file.path for file in found.files] == ["good.png"]
        assert [bad.path for bad in found.unreadable] == [name]
        assert reason in found.unreadable[0].reason
        assert found.total == 2

    def test_a_bomb_is_rejected_without_a_warning(self, tmp_path: Path) -> None:
        """Also while other threads open files; and the warning filters are restored."""
        bombs: dict[str, bytes | str] = {f"{number}.png": png(10_000, 10_000, 8, 2, b"") for number in range(40)}
        folder = write(tmp_path, {**bombs, **images(40, captions=False)})
        with warnings.catch_warnings(record=True) as stated:
            warnings.simplefilter("always")
            before = list(warnings.filters)
            found = scan(LocalBackend(folder), "image", workers=8)
            assert list(warnings.filters) == before
        assert len(found.unreadable) == 40
        assert stated == []

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_without_permission(self, tmp_path: Path) -> None:
        (write(tmp_path, {"a.png": image()}) / "a.png").chmod(0)
        assert "Permission" in scan(LocalBackend(tmp_path), "image").unreadable[0].reason

    @pytest.mark.parametrize(("kind", "name"), [("video", "a.mp4"), ("audio", "a.wav")])
    def test_video_and_sound(self, tmp_path: Path, kind: Kind, name: str) -> None:
        found = scan(LocalBackend(write(tmp_path, {name: b"nothing of the kind"})), kind)
        assert [bad.path for bad in found.unreadable] == [name]


class TestMemory:
    def test_a_second_scan_opens_nothing(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {**images(4), "bad.png": b"x"})
        first, opened = remembered(folder, tmp_path)
        again, opened_again = remembered(folder, tmp_path)
        assert len(opened) == 5, "each once"
        assert opened_again == ["bad.png"]
        assert again.reused == 4, "what failed is looked at again: a chmod mends a file without changing its time"
        assert (again.files, again.unreadable) == (first.files, first.unreadable)

    def test_changed_new_and_removed_files_are_detected(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", images(4, captions=False))
        remembered(folder, tmp_path)
        write(folder, {"001.png": image(32, 32), "new.png": image()})
        (folder / "002.png").unlink()
        found, opened = remembered(folder, tmp_path)
        assert opened == ["001.png", "new.png"]
        assert [file.path for file in found.files] == ["000.png", "001.png", "003.png", "new.png"]
        assert found.files[1].facts == ImageFacts(32, 32, False)
        assert remembered(folder, tmp_path)[1] == []

    def test_a_new_modification_time_is_read_again(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.bmp": image(seed=1, kind="BMP")})
        before, _ = remembered(folder, tmp_path)
        write(folder, {"a.bmp": image(seed=2, kind="BMP")})
        os.utime(folder / "a.bmp", ns=(1, 1))
        after, _ = remembered(folder, tmp_path)
        assert before.files[0].size == after.files[0].size
        assert before.files[0].digest != after.files[0].digest

    def test_storage_without_times_is_always_read(self, tmp_path: Path) -> None:
        backend = DictBackend({"a.png": image()})
        for _ in range(2):
            assert scan(backend, "image", saved=SavedScan(tmp_path, "memory", "image")).reused == 0

    @pytest.mark.parametrize(
        "content",
        [
            "",
            "[]",
            "{",
            '{"version": 0, "files": {}}',
            '{"version": 2, "files": {"000.png": {}}}',
            '{"version": 2, "files": 3}',
        ],
    )
    def test_damaged_or_outdated_results_are_ignored(self, tmp_path: Path, content: str) -> None:
        folder = write(tmp_path / "data", images(2))
        remembered(folder, tmp_path)
        file = SavedScan(tmp_path / "scans", str(folder), "image").file
        assert json.loads(file.read_text())["version"] == SCAN_VERSION
        file.write_text(content)
        found, opened = remembered(folder, tmp_path)
        assert len(found.files) == len(opened) == 2
        assert json.loads(file.read_text())["version"] == SCAN_VERSION

    def test_an_unwritable_folder_is_reported_and_does_not_stop_a_run(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", images(2))
        (tmp_path / "scans").write_text("a file where the folder should be")
        found, _ = remembered(folder, tmp_path)
        assert len(found.files) == 2
        assert found.save_error is not None
        assert "scans" in found.save_error

    def test_datasets_of_one_folder_keep_each_others_results(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.png": image(), "b.jpg": image(kind="JPEG"), "gone.png": image()})
        backend = LocalBackend(folder)
        saved = SavedScan(tmp_path / "scans", backend.root, "image")
        first = [scan(backend, "image", saved=saved, extensions=[kind]).reused for kind in ("png", "jpg")]
        (folder / "gone.png").unlink()
        again = [scan(backend, "image", saved=saved, extensions=[kind]).reused for kind in ("png", "jpg")]
        assert (first, again) == ([0, 0], [1, 1])
        assert json.loads(saved.file.read_text())["files"].keys() == {"a.png", "b.jpg"}

    def test_staging_some_files_keeps_the_results_of_others(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "data", {"a.png": image(), "b.jpg": image(kind="JPEG")})
        saved = SavedScan(tmp_path / "scans", str(folder), "image")
        assert len(scan(LocalBackend(folder), "image", saved=saved).files) == 2
        options = InMemory(file_extensions=("png",))
        dataset = Dataset(id="d", path=str(folder), type="in_memory", in_memory=options)
        with open_backend(dataset, machine=this_machine()) as staged:
            found = scan(staged, "image", saved=saved)
        assert (len(found.files), found.reused, found.others) == (1, 1, {".jpg": 1})
        assert scan(LocalBackend(folder), "image", saved=saved).reused == 2

    def test_folders_of_the_same_name_have_separate_results(self, tmp_path: Path) -> None:
        one, other = (SavedScan(tmp_path, root, "image").file for root in ("/a/photos", "/b/photos"))
        assert one != other
        assert one.name.startswith("photos-image-")
        assert SavedScan(tmp_path, "/a/photos", "video").file != one


def test_a_file_removed_after_listing_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    backend = LocalBackend(str(tmp_path))
    (tmp_path / "a.png").unlink()
    assert examine(backend, "a.png", "image", 1) == "it was removed before it could be read"
