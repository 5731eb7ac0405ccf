"""Flips and transforms: config entries, random values and effects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gracetune.data.media.augment import METHODS, applied_transforms, augmented, augmented_mask, read_transforms
from gracetune.data.refs import AppliedAugmentation, Transform
from gracetune.errors import ConfigError
from unit.data.media.generated import generated_image

LOCATION = "datasets[0].augmentation.transforms"


def always(method: str, **options: Any) -> AppliedAugmentation:
    return AppliedAugmentation(seed=1, transforms=read_transforms([{"method": method, "p": 1, **options}], LOCATION))


def changed(image: Image.Image, augmentation: AppliedAugmentation, digest: str = "d") -> np.ndarray:
    return np.asarray(augmented([image], augmentation, digest)[0]).astype(int)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def test_flips() -> None:
    image = generated_image()
    assert np.array_equal(changed(image, AppliedAugmentation(flip_x=True)), pixels(image)[:, ::-1])
    assert np.array_equal(changed(image, AppliedAugmentation(flip_y=True)), pixels(image)[::-1])
    assert np.array_equal(changed(image, AppliedAugmentation(flip_x=True, flip_y=True)), pixels(image)[::-1, ::-1])
    assert np.array_equal(changed(image, AppliedAugmentation()), pixels(image))


def test_the_two_ways_to_write_an_entry_mean_the_same() -> None:
    nested = read_transforms([{"method": "ColorJitter", "params": {"hue": 0.1, "p": 0.3}}], LOCATION)
    flat = read_transforms([{"method": "ColorJitter", "hue": 0.1, "p": 0.3}], LOCATION)
    factor = (0.8, 1.2)
    options = (("brightness", factor), ("contrast", factor), ("hue", (-0.1, 0.1)), ("saturation", factor))
    assert nested == flat == (Transform("ColorJitter", 0.3, options),)


def test_missing_options_have_albumentations_defaults() -> None:
    (found,) = read_transforms([{"method": "RandomBrightnessContrast"}], LOCATION)
    assert found == Transform(
        "RandomBrightnessContrast", 0.5, (("brightness_limit", (-0.2, 0.2)), ("contrast_limit", (-0.2, 0.2)))
    )
    assert read_transforms([{"method": "ToGray", "always_apply": True}], LOCATION)[0].p == 1


def test_an_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        read_transforms(
            [{"method": "HorizontalFlip"}, {"method": "HorisontalFlip"}, {"method": "CoarseDropout"}, {}], LOCATION
        )
    first, second, third = caught.value.problems
    assert (first.key, first.found, first.hint) == (
        f"{LOCATION}[1].method",
        "'HorisontalFlip'",
        "write `HorizontalFlip`",
    )
    assert all(name in second.expected for name in METHODS)
    assert second.hint == "choose one of them, or remove the entry"
    assert third.found == "None"


@pytest.mark.parametrize(
    ("entry", "key", "hint"),
    [
        ({"method": "ColorJitter", "hues": 0.1}, "hues", "write `hue`"),
        ({"method": "ColorJitter", "hue": 0.9}, "hue", "write [-0.5, 0.5]"),
        ({"method": "ColorJitter", "hue": [0.3, 0.1]}, "hue", "write [-0.5, 0.5]"),
        ({"method": "ColorJitter", "hue": "a lot"}, "hue", "write [-0.5, 0.5]"),
        ({"method": "ColorJitter", "hue": True}, "hue", "write [-0.5, 0.5]"),
        ({"method": "ColorJitter", "hue": float("nan")}, "hue", "write [-0.5, 0.5]"),
        ({"method": "RandomGamma", "gamma_limit": 90}, "gamma_limit", "write [80, 120]"),
        ({"method": "HorizontalFlip", "p": 2}, "p", "write 0.5"),
        ({"method": "HorizontalFlip", "p": "often"}, "p", "write 0.5"),
        ({"method": "HorizontalFlip", "params": [1]}, "params", "write {p: 0.5}"),
        ({"method": ["HorizontalFlip"]}, "method", "choose one of them, or remove the entry"),
    ],
)
def test_invalid_entries_are_rejected(entry: dict[str, Any], key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_transforms([entry], LOCATION)
    (problem,) = caught.value.problems
    assert (problem.key, problem.hint) == (f"{LOCATION}[0].{key}", hint)


def test_every_method_changes_the_image_and_keeps_its_size() -> None:
    image = generated_image(16, 16)
    for method in METHODS:
        found = [augmented([image], replace(always(method), epoch=epoch), "d")[0] for epoch in range(6)]
        assert {other.size for other in found} == {(16, 16)}, method
        assert {other.mode for other in found} == {"RGB"}, method
        assert any(not np.array_equal(other, image) for other in found), method


def test_brightness_and_contrast() -> None:
    grey = Image.new("RGB", (4, 4), (100, 100, 100))
    brighter = always("RandomBrightnessContrast", brightness_limit=[0.2, 0.2], contrast_limit=[0, 0])
    assert (changed(grey, brighter) == 151).all()
    harder = always("RandomBrightnessContrast", brightness_limit=[0, 0], contrast_limit=[0.5, 0.5])
    assert (changed(grey, harder) == 150).all()
    darkest = always("RandomBrightnessContrast", brightness_limit=[-1, -1], contrast_limit=[0, 0])
    assert (changed(grey, darkest) == 0).all()


def test_gamma_hue_saturation_and_grey() -> None:
    grey = Image.new("RGB", (4, 4), (100, 100, 100))
    assert (changed(grey, always("RandomGamma", gamma_limit=[200, 200])) == round(255 * (100 / 255) ** 2)).all()
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    third = always("HueSaturationValue", hue_shift_limit=[60, 60], sat_shift_limit=[0, 0], val_shift_limit=[0, 0])
    assert np.abs(changed(red, third)[0, 0] - (0, 255, 0)).max() <= 4
    pale = always("HueSaturationValue", hue_shift_limit=[0, 0], sat_shift_limit=[-255, -255], val_shift_limit=[0, 0])
    assert (changed(red, pale) == 255).all()
    third = always("ColorJitter", brightness=0, contrast=0, saturation=0, hue=[1 / 3, 1 / 3])
    assert np.abs(changed(red, third)[0, 0] - (0, 255, 0)).max() <= 4
    faded = always("ColorJitter", brightness=0, contrast=0, saturation=[0, 0], hue=0)
    assert np.ptp(changed(red, faded)[0, 0]) == 0
    assert np.ptp(changed(generated_image(), always("ToGray")), axis=-1).max() == 0


def test_blurs() -> None:
    dot = Image.new("RGB", (15, 15))
    dot.putpixel((7, 7), (255, 255, 255))
    box = changed(dot, always("Blur", blur_limit=[5, 5]))[..., 0]
    assert (box > 0).sum() == 25
    assert box.max() == 10
    narrow = changed(dot, always("GaussianBlur", sigma_limit=[0.6, 0.6]))[..., 0]
    wide = changed(dot, always("GaussianBlur", sigma_limit=[2, 2]))[..., 0]
    by_kernel = changed(dot, always("GaussianBlur", blur_limit=[7, 7]))[..., 0]
    assert narrow.max() > by_kernel.max() > wide.max()


def test_quarter_turns_only_where_the_shape_allows_them() -> None:
    square, wide = generated_image(16, 16), generated_image(24, 16)
    rotated = [changed(square, replace(always("RandomRotate90"), epoch=epoch)) for epoch in range(40)]
    for quarters in range(4):
        assert any(np.array_equal(found, np.rot90(pixels(square), quarters)) for found in rotated)
    halves = [changed(wide, replace(always("RandomRotate90"), epoch=epoch)) for epoch in range(40)]
    for found in halves:
        assert np.array_equal(found, pixels(wide)) or np.array_equal(found, pixels(wide)[::-1, ::-1])
    assert len({found.tobytes() for found in halves}) == 2


JITTER = read_transforms([{"method": "ColorJitter", "p": 0.5}, {"method": "RandomRotate90", "p": 0.5}], LOCATION)


@given(st.integers(0, 2**32), st.integers(0, 100), st.text(max_size=8))
def test_random_values_depend_only_on_seed_epoch_and_digest(seed: int, epoch: int, digest: str) -> None:
    augmentation = AppliedAugmentation(seed=seed, epoch=epoch, transforms=JITTER)
    assert list(applied_transforms(augmentation, digest)) == list(
        applied_transforms(replace(augmentation, flip_x=True), digest)
    )
    assert list(applied_transforms(replace(augmentation, of=digest), "another")) == list(
        applied_transforms(augmentation, digest)
    )


def test_other_seeds_epochs_and_digests_give_other_values() -> None:
    base = AppliedAugmentation(seed=1, transforms=JITTER)
    draws = {
        str(list(applied_transforms(replace(base, seed=seed, epoch=epoch), digest)))
        for seed in range(4)
        for epoch in range(4)
        for digest in "abcd"
    }
    # Half of a half samples nothing at all; the others all differ.
    assert 40 < len(draws) < 60


def test_a_transform_is_applied_with_its_probability() -> None:
    base = AppliedAugmentation(seed=1, transforms=read_transforms([{"method": "ToGray", "p": 0.3}], LOCATION))
    share = np.mean([len(list(applied_transforms(base, str(number)))) for number in range(4000)])
    assert share == pytest.approx(0.3, abs=0.03)


def test_without_a_seed_nothing_is_applied() -> None:
    assert list(applied_transforms(replace(always("ToGray"), seed=None), "d")) == []


def test_all_frames_get_the_same_values() -> None:
    augmentation = replace(always("ColorJitter"), epoch=3)
    image = generated_image(16, 16)
    frames = augmented([image, image.copy(), image.copy()], augmentation, "d")
    assert len({frame.tobytes() for frame in frames}) == 1


@pytest.mark.parametrize("epoch", range(8))
def test_a_mask_moves_with_its_image_and_keeps_its_values(epoch: int) -> None:
    entries = [{"method": "ColorJitter", "p": 1}, {"method": "HorizontalFlip"}, {"method": "RandomRotate90", "p": 1}]
    augmentation = AppliedAugmentation(flip_y=True, seed=5, epoch=epoch, transforms=read_transforms(entries, LOCATION))
    mask = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    moved = np.asarray(augmented_mask(mask, augmentation, "d"))
    # Of the eight ways a square can lie, the mask lies as its image does: the brightest corner says which.
    colours = np.zeros((16, 16, 3), np.uint8)
    colours[12:, 12:], colours[12:, :12] = 255, 128
    image = augmented([Image.fromarray(colours)], augmentation, "d")[0]
    rotated = augmented_mask(Image.fromarray(colours[..., 0]), augmentation, "d")
    bright = np.asarray(image).astype(float).sum(axis=-1)
    assert np.corrcoef(bright.ravel(), np.asarray(rotated).astype(float).ravel())[0, 1] > 0.95
    assert sorted(moved.ravel()) == list(range(256))
