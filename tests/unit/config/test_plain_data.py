from __future__ import annotations

import math
from datetime import UTC, date, datetime
from typing import Any

import pytest
from hypothesis import given

from gracetune.config.limits import DEEPEST, MOST_VALUES, NotPlainError
from gracetune.config.plain_data import plain
from unit.config.strategies import PLAIN


@given(PLAIN)
def test_plain_data_passes_as_an_equal_copy(value: Any) -> None:
    copied, oddities = plain(value)
    assert (copied, oddities) == (value, [])
    assert copied is not value or not isinstance(value, dict | list)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (10**400, "hundreds of digits"),
        (b"x", "binary"),
        ({1, 2}, "set"),
        (1j, "no plain value"),
        ("a\ud800b", "\\ud800"),
    ],
)
def test_what_no_configuration_can_hold_is_taken_out_and_named(value: Any, found: str) -> None:
    data, (odd,) = plain({"a": [1, {"b": value}], "c": "kept"})
    assert data == {"a": [1, {"b": None}], "c": "kept"}
    assert odd.path == ("a", 1, "b")
    assert found in odd.found
    assert odd.expected
    assert odd.hint


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (True, "true"),
        (None, "null"),
        (1.5, "1.5"),
        ("\udfff", "half"),
        ("k" * 2000, "2002"),
        ("\U0001f600" * 200, "2402"),
    ],
)
def test_odd_keys_are_named(key: Any, found: str) -> None:
    data, (odd,) = plain({"a": {key: 1, "b": 2}})
    assert data == {"a": {"b": 2}}
    assert found in odd.found


def test_a_huge_number_as_a_key_is_named_too() -> None:
    data, (odd,) = plain({"a": {1 << 20_000: 1, "b": 2}})
    assert data == {"a": {"b": 2}}
    assert (odd.path, odd.found) == (("a",), "a number of hundreds of digits")


def test_whole_numbers_are_names_but_not_twice() -> None:
    assert plain({1: "a"}) == ({"1": "a"}, [])
    data, (odd,) = plain({1: "a", "1": "b"})
    assert data == {"1": "a"}
    assert "twice" in odd.found


def test_dates_become_their_text() -> None:
    moment = datetime(2025, 1, 2, 3, 4, tzinfo=UTC)
    assert plain([date(2025, 1, 1), moment])[0] == ["2025-01-01", "2025-01-02T03:04:00+00:00"]


def test_shapes_that_cannot_be_used_at_all() -> None:
    itself: dict[str, Any] = {}
    itself["a"] = [itself]
    deep: Any = 1
    for _ in range(DEEPEST + 1):
        deep = [deep]
    bomb: Any = "lol"
    for _ in range(12):
        bomb = [bomb] * 10
    for value, found in ((itself, "contains itself"), (deep, "nesting"), (bomb, "more than")):
        with pytest.raises(NotPlainError, match=found):
            plain(value)


def test_what_is_shared_is_copied_for_each_place() -> None:
    shared = {"x": 1}
    data, _ = plain([shared, shared])
    assert data[0] == data[1]
    assert data[0] is not data[1]


def test_a_file_of_ordinary_size_is_far_from_the_limit() -> None:
    entries = [{f"key{number}": "value" for number in range(30)} for _ in range(500)]
    assert plain(entries)[1] == []
    assert MOST_VALUES > 500 * 31
