"""What a folder is taken to hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from gracetune.errors import ConfigError
from gracetune.proposal.contents import holds_media, inspect_folder
from unit.data.folders import image, images, write
from unit.data.media.generated import audio_bytes, every, tone, video_bytes


def test_images_and_their_captions(tmp_path: Path) -> None:
    files = images(4) | {"more/last.png": image(64, 64, seed=9), "notes.md": "not a caption"}
    found = inspect_folder(write(tmp_path / "cats", files))
    assert (found.media, len(found.files), found.ignored) == ("image", 5, 0)
    assert found.captions == {f"{number:03}.png": f"picture {number}" for number in range(4)}
    assert found.summary == "5 images, 4 with captions"
    assert found.median_side == pytest.approx(78.4, abs=1)


def test_the_kind_of_most_files_counts(tmp_path: Path) -> None:
    clip = video_bytes(every(1 / 25, 9), size=(64, 48))
    found = inspect_folder(write(tmp_path / "a", {"0.mp4": clip, "1.mp4": clip, "still.png": image()}))
    assert (found.media, len(found.clips), found.ignored) == ("video", 2, 1)
    sound = audio_bytes(tone(440, 1.0, 44_100), 44_100)
    assert inspect_folder(write(tmp_path / "b", {"0.wav": sound})).media == "audio"


def test_kohya_folders_caption_their_files(tmp_path: Path) -> None:
    found = inspect_folder(write(tmp_path / "a", {"10_sks dog/a.png": image(), "10_sks dog/b.png": image(seed=1)}))
    assert {*found.captions.values()} == {"sks dog"}


@pytest.mark.parametrize(("before", "after"), [("before", "after"), ("control", "mine"), ("x", "target")])
def test_edit_pairs(tmp_path: Path, before: str, after: str) -> None:
    files = {f"{side}/{number}.png": image(seed=number) for side in (before, after) for number in range(3)}
    files |= {f"{after}/{number}.txt": f"edit {number}" for number in range(3)}
    found = inspect_folder(write(tmp_path / "pairs", files))
    assert found.media == "edit"
    assert (found.before, found.trained) == (tmp_path / "pairs" / before, tmp_path / "pairs" / after)
    assert found.summary == "3 edit pairs, all with captions"


def test_two_folders_of_other_names_or_files_are_no_pairs(tmp_path: Path) -> None:
    same = {f"{side}/{number}.png": image(seed=number) for side in ("red", "blue") for number in range(3)}
    assert inspect_folder(write(tmp_path / "a", same)).media == "image"
    others = {f"before/{number}.png": image(seed=number) for number in range(3)}
    others |= {f"after/{number}.png": image(seed=number) for number in range(3, 6)}
    assert inspect_folder(write(tmp_path / "b", others)).media == "image"


def test_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        inspect_folder(tmp_path / "none")
    with pytest.raises(ConfigError, match="without images, clips or sounds"):
        inspect_folder(write(tmp_path / "a", {"notes.txt": "text"}))
    assert not holds_media(tmp_path / "a")
    assert holds_media(write(tmp_path / "below", {"more/a.png": image()}))
    with pytest.raises(ConfigError, match=r"a\.png"):
        inspect_folder(write(tmp_path / "b", {"a.png": b"no image"}))
    with pytest.raises(ConfigError, match="gracetune train"):
        inspect_folder(write(tmp_path / "c", {"a.yaml": "x"}) / "a.yaml")
