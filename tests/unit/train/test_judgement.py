"""Findings from made-up losses of images: one stands out, and then none."""

from __future__ import annotations

from dataclasses import replace

import torch

from gracetune.train.judgement import JudgedSample, find_all, robust_distances

LOOKS = [*torch.eye(12)]


def usual(count: int = 12) -> list[JudgedSample]:
    """Images that training improved by 8 to 12 %, and whose captions help by 4 to 6 %."""
    found = []
    for number in range(count):
        first = 0.4 + 0.02 * (number % 5)
        last = first * (0.88 + 0.01 * (number % 5))
        other = last * (1.04 + 0.005 * (number % 4))
        name = f"{number}.png"
        found.append(JudgedSample("a", name, f"digest of {name}", f"caption of {name}", first, last, other, 0.5))
    return found


def kinds(samples: list[JudgedSample], looks: list[torch.Tensor] | None = None) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.kind, one.samples) for one in find_all(samples, LOOKS if looks is None else looks)]


def test_images_that_behave_alike_have_no_findings() -> None:
    assert kinds(usual()) == []
    few = [replace(one, last=one.first * (1 - number / 8)) for number, one in enumerate(usual(6))]
    assert kinds(few, LOOKS[:6]) == [], "too few to know what is usual"
    assert robust_distances([1.0] * 20) == [0.0] * 20


def test_one_of_each_kind() -> None:
    samples = usual()
    samples[2] = replace(samples[2], other_caption=samples[2].last * 0.9)
    samples[5] = replace(samples[5], last=samples[5].first * 0.3, other_caption=samples[5].first * 0.315)
    samples[7] = replace(samples[7], last=samples[7].first * 1.2, other_caption=samples[7].first * 1.26)
    samples[8] = replace(samples[8], enlarged=1.9)
    looks = [*LOOKS[:11], torch.nn.functional.normalize(LOOKS[0] + 0.1 * LOOKS[11], dim=0)]
    assert kinds(samples, looks) == [
        ("mislabelled", (2,)), ("mislabelled", (7,)), ("memorised", (5,)), ("duplicate", (0, 11)), ("too small", (8,)),
    ]  # fmt: skip
    reasons = [one.reason for one in find_all(samples, looks)]
    assert reasons == [
        "its loss is 10.0% lower with the caption of another image",
        "training changed its loss by +20.0%, and a usual image's by -10.5%",
        "training removed 70.0% of its loss, and 10.5% of a usual image's",
        "2 times nearly the same image, with 2 different captions",
        "scaled up 1.9 times",
    ]


def test_a_hard_image_whose_caption_hardly_helps_is_likely_mislabelled() -> None:
    """Not a hard image whose caption helps as much as those of other images do."""
    samples = usual()
    hard = {"first": 1.1 * samples[2].first / samples[2].last, "last": 1.1}
    samples[2] = replace(samples[2], **hard, other_caption=1.1 * 1.01)
    (found,) = find_all(samples, LOOKS)
    assert (found.kind, found.samples) == ("mislabelled", (2,))
    assert found.reason == "its loss is 2.9 times a usual image's, and with another caption only 1% higher (usually 4%)"
    samples[2] = replace(samples[2], **hard, other_caption=1.1 * 1.05)
    assert find_all(samples, LOOKS) == ()


def test_duplicates_are_groups() -> None:
    samples = [replace(one, digest="same", caption="x") if number in (1, 4, 9) else one
               for number, one in enumerate(usual())]  # fmt: skip
    looks = [LOOKS[1] if number in (1, 4, 9) else one for number, one in enumerate(LOOKS)]
    (found,) = find_all(samples, looks)
    assert (found.samples, found.reason) == ((1, 4, 9), "3 times the same file")
