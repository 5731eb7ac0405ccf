"""Frames of videos: what configs of the peers take from clips of several lengths and rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config.run_config import RunConfig
from gracetune.data.index import NO_CAPTION, Appearance
from gracetune.data.index_builder import build_index
from gracetune.data.items import sort_into_buckets
from gracetune.data.media.probe import VideoFacts
from gracetune.data.refs import SampleRef
from gracetune.data.scan import MediaFile
from unit.data.media.generated import every, number_of, video_bytes
from unit.fidelity.recorded import aitoolkit, geometry, index_of, recorded, simpletuner, values

AITOOLKIT = recorded("aitoolkit", "frames")["cases"]
READINGS = recorded("aitoolkit", "frames")["readings"]
SIMPLETUNER = recorded("simpletuner", "mixing")["frames"]


def taken(config: RunConfig, frames: int, fps: float, variants: int = 1) -> list[SampleRef]:
    """What is taken of a clip, at several visits."""
    dataset, requested = config.datasets[0], geometry(config)
    file = MediaFile("clip.mp4", 1, f"{frames}at{fps}", VideoFacts(832, 480, frames, frames / fps))
    items, _ = sort_into_buckets([file], dataset, requested, 1)
    if not items:
        return []
    index = index_of(dataset, requested, 1, items)
    return [
        index.describe(index.datasets[0], items[0], Appearance(variant, 0), NO_CAPTION) for variant in range(variants)
    ]


def numbers(ref: SampleRef) -> list[int]:
    assert ref.clip is not None
    assert ref.clip.numbers is not None
    assert len(ref.clip.numbers) == ref.bucket.frames
    return [*ref.clip.numbers]


OPTIONS = {str(sorted(case["options"].items())): case["options"] for case in AITOOLKIT}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=lambda options: "-".join(map(str, options.values())))
def test_ai_toolkit_s_frames(tmp_path: Path, options: dict[str, Any]) -> None:
    config = aitoolkit(tmp_path, "wan22_14b", datasets=[{"resolution": 256, **options}]).config
    for case in (case for case in AITOOLKIT if case["options"] == options):
        if "numbers" in case:
            assert [numbers(ref) for ref in taken(config, case["frames"], case["fps"])] == [case["numbers"]]
            continue
        found = [numbers(ref) for ref in taken(config, case["frames"], case["fps"], variants=READINGS)]
        assert all([number - one[0] for number in one] == case["relative"] for one in found)
        starts = [one[0] for one in found]
        last = case["frames"] - 1 - case["relative"][-1]
        assert min(starts) >= 0
        assert max(starts) <= last
        # Of as many readings as theirs.
        assert abs(min(starts) - case["starts"][0]) <= 0.15 * last + 1
        assert abs(max(starts) - case["starts"][1]) <= 0.15 * last + 1
        assert abs(len({*starts}) - case["starts"][2]) <= 0.25 * case["starts"][2]


@pytest.mark.parametrize("case", SIMPLETUNER, ids=lambda case: str(case["video"]))
def test_simpletuner_s_frames(tmp_path: Path, case: dict[str, Any]) -> None:
    entry = {"dataset_type": "video", "video": case["video"]}
    config = simpletuner(tmp_path, "wan 14b", datasets=[entry]).config
    ours = {length: taken(config, int(length), 16.0) for length in case["taken"]}
    assert {length: refs[0].bucket.frames if refs else 0 for length, refs in ours.items()} == case["taken"]
    clips = [refs[0].clip for refs in ours.values() if refs]
    assert all(clip is not None and (clip.start, clip.fps, clip.spread) == (0.0, None, False) for clip in clips)


def test_the_frames_with_these_numbers_are_the_ones_that_are_decoded(tmp_path: Path) -> None:
    """Frames of the file show their own number."""
    clips = tmp_path / "clips"
    clips.mkdir()
    (clips / "a.mp4").write_bytes(video_bytes(every(1 / 16, 100), size=(64, 64)))
    for options in ({"num_frames": 17}, {"num_frames": 5, "shrink_video_to_frames": False, "fps": 5},
                    {"auto_frame_count": True, "fps": 5}):  # fmt: skip
        entry = {"folder_path": str(clips), "resolution": 64, **options}
        config = aitoolkit(tmp_path, "wan22_14b", datasets=[entry]).config
        (batch,) = values(config, 1)
        pixels = build_index(config, geometry(config)).load(batch.samples[0]).pixels
        assert pixels is not None
        shown = [number_of(frame) for frame in pixels.permute(1, 2, 3, 0).numpy()]
        assert shown == numbers(batch.samples[0])
