"""Flips and the `transforms` of a dataset: a few of albumentations' methods that are useful for fine-tuning.

Entries are written as in ai-toolkit (`{"method": "ColorJitter", "params": {"hue": 0.1, "p": 0.5}}`) or flat
(`{"method": "ColorJitter", "hue": 0.1, "p": 0.5}`), with albumentations' option names, meanings and defaults. Random
values depend only on the sample's `AppliedAugmentation` and digest. All frames of a video get the same values, and a
mask is flipped and rotated with its image. For images that are not square, `RandomRotate90` only makes half turns,
because the bucket must not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image, ImageEnhance, ImageFilter

from gracetune.config.spelling import nearest
from gracetune.data.refs import AppliedAugmentation, Transform
from gracetune.errors import ConfigError, Problem
from gracetune.seeded_random import uniform

Range = tuple[float, float]
Values = Mapping[str, float]
Effect = Callable[[Image.Image, Values], Image.Image]


@dataclass(frozen=True)
class _Option:
    default: Range
    widen: Callable[[float], Range] | None
    """The range that a single number means; None if only a pair is allowed."""
    limits: Range
    """The smallest and the largest allowed value."""


@dataclass(frozen=True)
class _Method:
    effect: Effect
    options: Mapping[str, _Option] = field(default_factory=dict)
    moves: bool = False
    """Whether it moves pixels, so that it must be applied to masks too."""


@dataclass(frozen=True)
class AppliedTransform:
    """A transform that is applied to this sample, with its random values."""

    method: str
    values: Values


def read_transforms(entries: Sequence[Mapping[str, Any]], location: str) -> tuple[Transform, ...]:
    """Validate the `transforms` of a config and fill in defaults. `location` names the list in messages."""
    problems: list[Problem] = []
    transforms = [_read(entry, f"{location}[{number}]", problems) for number, entry in enumerate(entries)]
    if problems:
        raise ConfigError(problems)
    return tuple(transform for transform in transforms if transform is not None)


def augmented(images: Sequence[Image.Image], augmentation: AppliedAugmentation, digest: str) -> list[Image.Image]:
    """Apply the augmentation to one image, or to all frames of a video."""
    applied = list(applied_transforms(augmentation, digest))
    return [_changed(image, augmentation, applied) for image in images]


def augmented_mask(mask: Image.Image, augmentation: AppliedAugmentation, digest: str) -> Image.Image:
    """Apply the flips and the transforms that move pixels."""
    return _changed(
        mask, augmentation, [found for found in applied_transforms(augmentation, digest) if METHODS[found.method].moves]
    )


def applied_transforms(augmentation: AppliedAugmentation, digest: str) -> Iterator[AppliedTransform]:
    """The transforms of the augmentation that are applied to this variant of the sample, in order."""
    if augmentation.seed is None:
        return
    subject = augmentation.of if augmentation.of is not None else digest
    for number, transform in enumerate(augmentation.transforms):
        key = (augmentation.seed, "transform", augmentation.epoch, subject, number)
        if uniform(*key, "p") < transform.p:
            values = {name: low + (high - low) * uniform(*key, name) for name, (low, high) in transform.options}
            yield AppliedTransform(transform.method, {**values, "turn": uniform(*key, "turn")})


def _changed(image: Image.Image, augmentation: AppliedAugmentation, applied: Sequence[AppliedTransform]) -> Image.Image:
    if augmentation.flip_x:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if augmentation.flip_y:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    for found in applied:
        image = METHODS[found.method].effect(image, found.values)
    return image


def _flip_x(image: Image.Image, values: Values) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def _flip_y(image: Image.Image, values: Values) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)


def _rotate90(image: Image.Image, values: Values) -> Image.Image:
    rotations = (None, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270)
    quarters = int(values["turn"] * 4)
    rotation = rotations[quarters if image.width == image.height else quarters // 2 * 2]
    return image if rotation is None else image.transpose(rotation)


def _brightness_contrast(image: Image.Image, values: Values) -> Image.Image:
    contrast, brightness = 1 + values["contrast_limit"], 255 * values["brightness_limit"]
    return _by_table(image, lambda level: level * contrast + brightness)


def _gamma(image: Image.Image, values: Values) -> Image.Image:
    return _by_table(image, lambda level: 255 * (level / 255) ** (values["gamma_limit"] / 100))


def _jitter(image: Image.Image, values: Values) -> Image.Image:
    image = ImageEnhance.Brightness(image).enhance(values["brightness"])
    image = ImageEnhance.Contrast(image).enhance(values["contrast"])
    image = ImageEnhance.Color(image).enhance(values["saturation"])
    return _shifted(image, round(values["hue"] * 256), 0, 0)


def _hue_saturation_value(image: Image.Image, values: Values) -> Image.Image:
    hue = round(values["hue_shift_limit"] / 180 * 256)
    return _shifted(image, hue, round(values["sat_shift_limit"]), round(values["val_shift_limit"]))


def _grey(image: Image.Image, values: Values) -> Image.Image:
    return image.convert("L").convert("RGB")


def _blur(image: Image.Image, values: Values) -> Image.Image:
    return image.filter(ImageFilter.BoxBlur((_odd(values["blur_limit"]) - 1) / 2))


def _gaussian_blur(image: Image.Image, values: Values) -> Image.Image:
    # OpenCV's formula for the sigma of a kernel size, used if no sigma is given.
    kernel_sigma = 0.3 * ((_odd(values["blur_limit"]) - 1) * 0.5 - 1) + 0.8
    return image.filter(ImageFilter.GaussianBlur(values["sigma_limit"] or kernel_sigma))


def _by_table(image: Image.Image, level: Callable[[int], float]) -> Image.Image:
    """Map every color level by a function, rounded and clipped."""
    return image.point([min(255, max(0, round(level(value)))) for value in range(256)] * 3)


def _shifted(image: Image.Image, hue: int, saturation: int, value: int) -> Image.Image:
    """Shift in HSV. Hue wraps around at 256; saturation and value are clipped."""
    if not (hue or saturation or value):
        return image
    table = [(level + hue) % 256 for level in range(256)]
    for shift in (saturation, value):
        table += [min(255, max(0, level + shift)) for level in range(256)]
    return image.convert("HSV").point(table).convert("RGB")


def _odd(size: float) -> int:
    """The nearest odd kernel size."""
    return 2 * round((size - 1) / 2) + 1


def _either_way(size: float) -> Range:
    return -size, size


def _around_one(size: float) -> Range:
    return max(0.0, 1 - size), 1 + size


_SHIFT = _Option((-0.2, 0.2), _either_way, (-1, 1))
_FACTOR = _Option((0.8, 1.2), _around_one, (0, math.inf))
_KERNEL = _Option((3, 7), lambda size: (min(3.0, size), size), (1, 255))

METHODS: Mapping[str, _Method] = {
    "HorizontalFlip": _Method(_flip_x, moves=True),
    "VerticalFlip": _Method(_flip_y, moves=True),
    "RandomRotate90": _Method(_rotate90, moves=True),
    "RandomBrightnessContrast": _Method(_brightness_contrast, {"brightness_limit": _SHIFT, "contrast_limit": _SHIFT}),
    "ColorJitter": _Method(
        _jitter,
        {
            "brightness": _FACTOR,
            "contrast": _FACTOR,
            "saturation": _FACTOR,
            "hue": _Option((-0.5, 0.5), _either_way, (-0.5, 0.5)),
        },
    ),
    "HueSaturationValue": _Method(
        _hue_saturation_value,
        {
            "hue_shift_limit": _Option((-20, 20), _either_way, (-180, 180)),
            "sat_shift_limit": _Option((-30, 30), _either_way, (-255, 255)),
            "val_shift_limit": _Option((-20, 20), _either_way, (-255, 255)),
        },
    ),
    "RandomGamma": _Method(_gamma, {"gamma_limit": _Option((80, 120), None, (1, math.inf))}),
    "ToGray": _Method(_grey),
    "Blur": _Method(_blur, {"blur_limit": _KERNEL}),
    "GaussianBlur": _Method(
        _gaussian_blur,
        {"blur_limit": _KERNEL, "sigma_limit": _Option((0, 0), lambda sigma: (0.0, sigma), (0, 100))},
    ),
}
_PROBABILITY = 0.5


def _read(entry: Mapping[str, Any], location: str, problems: list[Problem]) -> Transform | None:
    given = {key: value for key, value in entry.items() if key not in ("method", "params")}
    params = entry.get("params", {})
    if isinstance(params, Mapping):
        given |= params
    else:
        problems.append(Problem(f"{location}.params", repr(params), "the method's options", "write {p: 0.5}"))
    name = entry.get("method")
    if not isinstance(name, str) or name not in METHODS:
        near = nearest(name, METHODS) if isinstance(name, str) else None
        hint = f"write `{near}`" if near else "choose one of them, or remove the entry"
        problems.append(Problem(f"{location}.method", repr(name), f"one of {', '.join(METHODS)}", hint))
        return None
    options = METHODS[name].options
    problems += [
        _unknown(f"{location}.{key}", key, name) for key in given if key not in {*options, "p", "always_apply"}
    ]
    probability = 1.0 if given.get("always_apply") is True else given.get("p", _PROBABILITY)
    if not _is_number(probability) or not 0 <= probability <= 1:
        problems.append(
            Problem(f"{location}.p", repr(probability), "a probability from 0 to 1", f"write {_PROBABILITY}")
        )
        probability = _PROBABILITY
    ranges = {
        key: _range(given[key], option, f"{location}.{key}", problems) if key in given else option.default
        for key, option in options.items()
    }
    return Transform(name, float(probability), tuple(sorted(ranges.items())))


def _unknown(location: str, key: str, method: str) -> Problem:
    supported = [*METHODS[method].options, "p"]
    near = nearest(key, supported)
    hint = f"write `{near}`" if near else f"remove `{key}`"
    return Problem(location, f"`{key}`", f"an option of {method}: {', '.join(supported)}", hint)


def _range(value: Any, option: _Option, location: str, problems: list[Problem]) -> Range:
    found = _as_range(value, option)
    low, high = option.limits
    if found is not None and low <= found[0] <= found[1] <= high:
        return found
    forms = "two numbers, the smaller first" if option.widen is None else "one number, or two with the smaller first"
    first, last = option.default
    expected = f"{forms}, from {low:g} to {high:g}"
    problems.append(Problem(location, repr(value), expected, f"write [{first:g}, {last:g}]"))
    return option.default


def _as_range(value: Any, option: _Option) -> Range | None:
    if _is_number(value):
        return option.widen(float(value)) if option.widen is not None else None
    if isinstance(value, list | tuple) and len(value) == 2 and all(_is_number(end) for end in value):
        return float(value[0]), float(value[1])
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
