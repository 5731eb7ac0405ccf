from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.data.copies.splits import SplitError, SplitPart, parse_split, read_card, splits_of


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["a.png", "b/c.png"], {"train": ["a.png", "b/c.png"]}),
        (["train/a.png", "val/b.png", "x.png"], {"train": ["train/a.png"], "validation": ["val/b.png"]}),
        (["data/train-00000-of-00002-ab12.parquet", "data/extra-00000-of-00001.parquet"],
         {"extra": ["data/extra-00000-of-00001.parquet"], "train": ["data/train-00000-of-00002-ab12.parquet"]}),
        (["my_train.parquet", "my_test.parquet"], {"test": ["my_test.parquet"], "train": ["my_train.parquet"]}),
        (["test_01.jpg", "b.jpg"], {"train": ["b.jpg", "test_01.jpg"]}),
        (["trainer/a.png"], {"train": ["trainer/a.png"]}),
    ],
)  # fmt: skip
def test_splits_from_file_names(files: list[str], expected: dict[str, list[str]]) -> None:
    assert splits_of(files, {}, None) == expected


def test_the_card_comes_first() -> None:
    card = read_card("""---
license: mit
configs:
- config_name: default
  data_dir: parts
  data_files:
  - split: train
    path: ["**/a*.parquet", "b?.parquet"]
  - split: rest
    path: other/*
---
text
---
""")
    files = [
        "parts/x/y/a1.parquet",
        "parts/a2.parquet",
        "parts/b3.parquet",
        "parts/other/z",
        "parts/other/deep/z",
        "a.parquet",
    ]
    assert splits_of(files, card, None) == {
        "train": ["parts/a2.parquet", "parts/x/y/a1.parquet", "parts/b3.parquet"], "rest": ["parts/other/z"],
    }  # fmt: skip
    assert read_card("# no card") == {}
    assert read_card("---\n: [broken\n---\n") == {}


@given(st.integers(0, 500), st.integers(-600, 600), st.integers(-600, 600))
def test_bounds_are_those_of_a_slice(count: int, start: int, stop: int) -> None:
    part, = parse_split(f"train[{start}:{stop}]")  # fmt: skip
    assert [*part.bounds(count)] == [*range(count)][start:stop]


@given(st.integers(0, 1000), st.integers(0, 100), st.integers(0, 100))
def test_percentages_split_without_a_rest(count: int, one: int, other: int) -> None:
    low, high = sorted((one, other))
    parts = parse_split(f"t[:{low}%]+t[{low}%:{high}%]+t[{high}%:]")
    assert [number for part in parts for number in part.bounds(count)] == [*range(count)]


def test_invalid_splits() -> None:
    assert parse_split("train + test[:3]") == (SplitPart("train"), SplitPart("test", None, "3"))
    for text in ("", "train[", "train[1]", "+", "train[a:b]"):
        with pytest.raises(SplitError):
            parse_split(text)
