from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.units import GIB, KIB, MIB, TIB, format_bytes, format_duration, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("512MiB", 512 * MIB),
        ("80 GiB", 80 * GIB),
        ("1.5g", 3 * GIB // 2),
        ("2GB", 2 * 10**9),
        (".5k", 512),
    ],
)
def test_parses_what_people_type(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "5.0x", "1e3", "12 parsecs", "inf", "1..2"])
def test_rejects_everything_else_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="write for example"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (100 * GIB, "100 GiB"), (96_000_000_000, "89.4 GiB"),
     (1024 * KIB - 1, "1.00 MiB"), (2 * TIB, "2.00 TiB"), (-3 * GIB, "-3.00 GiB")],
)  # fmt: skip
def test_prints_three_figures(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_printed_sizes_read_back_within_rounding(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.087, "87 ms"), (4.21, "4.2 s"), (59.97, "1m 00s"), (750, "12m 30s"), (11_220, "3h 07m"),
     (float("nan"), "unknown"), (float("inf"), "unknown"), (-1, "unknown")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
