from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.seeded_random import (
    below,
    normals,
    normals_for_content,
    random_bits,
    seeded,
    shuffled,
    torch_seed,
    uniform,
)

PARTS = st.lists(st.one_of(st.integers(), st.text()), max_size=4)


def test_draws_are_the_same_in_every_release() -> None:
    """A resumed run must go on as it would have: these numbers may never change."""
    assert random_bits(42, "left", "abc", 0) == 17319145446892848053
    assert below(1000, 42, "left", "abc", 0) == 938
    assert uniform(42, "dataset", 0, 7) == 0.723536272907642
    assert shuffled(8, 42, "order").tolist() == [3, 1, 7, 5, 6, 2, 0, 4]
    assert torch_seed(42, "window", 3, 0) == 1060890397131007585
    assert normals((2,), 42, "noise", [5, 9]).tolist() == [
        [-1.2349393367767334, 1.3906108140945435],
        [0.16221244633197784, 0.16041848063468933],
    ]
    assert normals_for_content("abc", (2,)).tolist() == [0.41787341237068176, 1.6691155433654785]
    with seeded(42, "layer"):
        assert torch.rand(2).tolist() == [0.8983460664749146, 0.5860961079597473]


def test_what_a_draw_is_for_is_never_confused() -> None:
    assert random_bits(1, "a", "b") != random_bits(1, "ab")
    assert random_bits(1, 2) != random_bits(1, "2")
    assert random_bits(12) != random_bits(1, 2)
    assert random_bits(1, "a", 1) != random_bits(1, "a", 2)


def test_file_names_that_are_no_unicode_can_be_drawn_for() -> None:
    assert random_bits(1, b"\xff.png".decode("utf-8", "surrogateescape")) != random_bits(1, "?.png")


@settings(deadline=None)
@given(st.integers(), PARTS, st.integers(1, 10**9))
def test_below_is_in_range_and_repeatable(seed: int, parts: list[int | str], limit: int) -> None:
    assert 0 <= below(limit, seed, *parts) < limit
    assert below(limit, seed, *parts) == below(limit, seed, *parts)


def test_a_limit_below_one_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        below(0, 1)


@settings(deadline=None)
@given(st.integers(), st.integers(0, 300))
def test_shuffled_is_a_permutation(seed: int, count: int) -> None:
    assert sorted(shuffled(count, seed, "x").tolist()) == list(range(count))


def test_draws_are_even() -> None:
    """Chi-squared of 10,000 values over 16 bins stays below the 99.9 % quantile (37.7 at 15 degrees)."""
    for name in ("left", "top"):
        counts = [0] * 16
        for number in range(10_000):
            counts[below(16, 7, name, number)] += 1
        assert sum((count - 625) ** 2 / 625 for count in counts) < 37.7


def test_every_place_of_a_shuffle_is_equally_likely() -> None:
    counts = [[0] * 5 for _ in range(5)]
    for seed in range(4_000):
        for place, number in enumerate(shuffled(5, seed, "order").tolist()):
            counts[number][place] += 1
    chi = sum((count - 800) ** 2 / 800 for row in counts for count in row)
    assert chi < 39.3  # 99.9 % quantile at 16 degrees
