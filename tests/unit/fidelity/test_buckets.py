"""Sizes of images: what configs of the peers make of 40 sizes, against the boxes their own code gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unit.fidelity.recorded import ARCHS, MODELS, aitoolkit, geometry, placed, recorded, simpletuner

AITOOLKIT = recorded("aitoolkit", "buckets")
SIMPLETUNER = recorded("simpletuner", "buckets")


def numbers(box: str) -> tuple[int, ...]:
    return tuple(map(int, box.split()))


def boxes(sizes: list[list[int]], found: list[str]) -> dict[tuple[int, int], tuple[int, ...]]:
    return {(width, height): numbers(box) for (width, height), box in zip(sizes, found, strict=True)}


# -- ai-toolkit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("resolution", [512, 768, 1024, 1328])
def test_ai_toolkit_s_buckets_and_crops(tmp_path: Path, arch: str, resolution: int) -> None:
    step = AITOOLKIT["steps"][arch]
    theirs = boxes(AITOOLKIT["sizes"], AITOOLKIT["buckets"][str(step)][str(resolution)])
    config = aitoolkit(tmp_path, arch, datasets=[{"resolution": resolution}]).config
    assert config.datasets[0].buckets.multiple == step
    assert placed(config, AITOOLKIT["sizes"]) == theirs


def test_ai_toolkit_s_squares(tmp_path: Path) -> None:
    theirs = boxes(AITOOLKIT["sizes"], AITOOLKIT["square_crop"]["512"])
    config = aitoolkit(tmp_path, "sdxl", datasets=[{"resolution": 512, "square_crop": True}]).config
    assert placed(config, AITOOLKIT["sizes"]) == theirs


def test_ai_toolkit_s_random_crops_have_its_size_and_lie_inside(tmp_path: Path) -> None:
    theirs = boxes(AITOOLKIT["sizes"], AITOOLKIT["random_crop"]["768"])
    config = aitoolkit(tmp_path, "flux", datasets=[{"resolution": 768, "random_crop": True}]).config
    for size, (wide, high, left, top, width, height) in placed(config, AITOOLKIT["sizes"]).items():
        assert (wide, high, width, height) == theirs[size]
        assert 0 <= left <= wide - width
        assert 0 <= top <= high - height


# -- SimpleTuner -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_simpletuner_s_alignment(tmp_path: Path, model: str) -> None:
    config = simpletuner(tmp_path, model, datasets=[{"caption_strategy": "filename"}], aspect_bucket_alignment=8).config
    assert config.datasets[0].buckets.multiple == SIMPLETUNER["alignments"][model]


def is_squeezed(size: tuple[int, int], box: tuple[int, ...]) -> bool:
    """Whether SimpleTuner changes an image's proportions, or gives it fewer pixels than its bucket has."""
    wide, high, width, height, _, _ = box
    squeezed = size[0] != size[1] and wide == high
    return squeezed or wide < width or high < height


CASES = [
    pytest.param(case, id=f"{case['alignment']}-{'-'.join(str(value) for value in case['entry'].values())}"
                 f"{'-' + str(case['rounding']) if 'rounding' in case else ''}")
    for case in SIMPLETUNER["buckets"]
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_simpletuner_s_buckets_and_crops(tmp_path: Path, case: dict[str, Any]) -> None:
    """Where it squeezes an image, ours has the same bucket and keeps the proportions."""
    model = {32: "qwen_image", 64: "flux"}[case["alignment"]]
    rounding = {"aspect_bucket_rounding": case["rounding"]} if "rounding" in case else {}
    config = simpletuner(tmp_path, model, datasets=[case["entry"]], **rounding).config
    ours, theirs = placed(config, SIMPLETUNER["sizes"]), boxes(SIMPLETUNER["sizes"], case["boxes"])
    assert {size: box[4:] for size, box in ours.items()} == {size: box[2:4] for size, box in theirs.items()}
    exact = {size: box for size, box in theirs.items() if not is_squeezed(size, box)}
    assert len(exact) >= 30
    assert {size: ours[size] for size in exact} == {
        size: (wide, high, left, top, width, height) for size, (wide, high, width, height, top, left) in exact.items()
    }
    for size in theirs.keys() - exact.keys():
        wide, high, _, _, width, height = ours[size]
        assert wide == width or high == height
        assert abs(wide / high * size[1] / size[0] - 1) < 0.01


@pytest.mark.parametrize("case", SIMPLETUNER["downsampled"], ids=lambda case: case["entry"]["resolution_type"])
def test_every_image_is_scaled_to_target_downsample_size(tmp_path: Path, case: dict[str, Any]) -> None:
    resolved = simpletuner(tmp_path, "flux", datasets=[case["entry"]])
    ours = placed(resolved.config, SIMPLETUNER["sizes"])
    theirs = boxes(SIMPLETUNER["sizes"], case["boxes"])
    del theirs[1024, 1024]  # of exactly the bucket's size: not scaled there
    covering = {size: box for size, box in theirs.items() if box[0] >= box[2] and box[1] >= box[3]}
    assert len(covering) >= 30
    for size, box in covering.items():
        assert (*ours[size][:2], *ours[size][4:]) == pytest.approx(box, abs=1)
    assert any("target_downsample_size" in note for note in resolved.notes)


@pytest.mark.parametrize("case", SIMPLETUNER["left_out"], ids=lambda case: "-".join(map(str, case["entry"].values())))
def test_minimum_image_size_leaves_out_the_same_images(tmp_path: Path, case: dict[str, Any]) -> None:
    config = simpletuner(tmp_path, "flux", datasets=[case["entry"]]).config
    kept = {tuple(size) for size, is_kept in zip(SIMPLETUNER["sizes"], case["kept"], strict=True) if is_kept}
    assert placed(config, SIMPLETUNER["sizes"]).keys() == kept


def test_without_crop_the_rest_is_cut_off_at_random(tmp_path: Path) -> None:
    config = simpletuner(tmp_path, "flux", datasets=[{"crop": False}]).config
    found = placed(config, [[1000 + number, 1700] for number in range(100)]).values()
    shares = {round(left / (wide - width), 2) for wide, _, left, _, width, _ in found if wide > width + 10}
    assert len(shares) > 10
    assert min(shares) < 0.2
    assert max(shares) > 0.8


def test_an_alignment_of_one_s_own_counts_where_simpletuner_lets_it(tmp_path: Path) -> None:
    own = {"aspect_bucket_alignment": 16, "i_know_what_i_am_doing": True}
    config = simpletuner(tmp_path, "qwen_image", datasets=[{}], **own).config
    assert config.datasets[0].buckets.multiple == 16
    assert geometry(config).least_multiple == 16
    config = simpletuner(tmp_path, "flux", datasets=[{}], **own).config
    assert config.datasets[0].buckets.multiple == 64
