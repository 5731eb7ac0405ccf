from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.draft import Draft, Origin, Path, UnquotedText, describe, dotted, parse_path, visible

NAMES = st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True)
PATHS = st.tuples(NAMES, st.lists(st.one_of(NAMES, st.integers(0, 5)), max_size=5)).map(lambda p: (p[0], *p[1]))
FILE = Origin("file", "k", "f.json")


@given(PATHS)
def test_dotted_and_parse_path_are_inverse(path: Path) -> None:
    assert parse_path(dotted(path)) == path


@pytest.mark.parametrize("text", ["", ".a", "a[", "[0]", "a[[x]]", "a=b", "a]b"])
def test_bad_key_paths(text: str) -> None:
    with pytest.raises(ValueError, match="key path"):
        parse_path(text)


def test_indexes_may_be_written_with_dots() -> None:
    assert parse_path("datasets.0.path") == ("datasets", 0, "path")


def test_a_dataset_may_be_named_in_brackets() -> None:
    assert parse_path("datasets[my photos-1.5].crop.style") == ("datasets", "my photos-1.5", "crop", "style")


@given(PATHS, st.integers())
def test_what_is_put_can_be_got(path: Path, value: int) -> None:
    draft = Draft("f")
    draft.put(path, value, FILE)
    assert draft.get(path) == value
    assert draft.origin(path) == FILE


@given(PATHS, PATHS)
def test_any_two_puts_never_crash_and_the_later_wins(first: Path, second: Path) -> None:
    draft = Draft("f")
    draft.put(first, 1, FILE)
    draft.put(second, 2, FILE)
    assert draft.get(second) == 2


def test_replacing_a_section_forgets_the_origins_inside_it() -> None:
    draft = Draft("f")
    draft.put(("a", "b"), 1, FILE)
    draft.put(("a",), {"b": 2}, Origin("flag", "--set a"))
    assert draft.origin(("a", "b")) == Origin("flag", "--set a")


def test_a_default_inside_of_a_value_does_not_replace_it() -> None:
    """`checkpoints: 100` is invalid, which has to be reported."""
    draft = Draft("f")
    draft.put(("checkpoints",), 100, FILE)
    draft.default(("checkpoints", "format"), "kohya", "sdxl")
    assert draft.get(("checkpoints",)) == 100


def test_a_default_never_replaces_what_was_given() -> None:
    draft = Draft("f")
    draft.put(("lr",), 1.0, FILE)
    draft.default(("lr",), 2.0, "SimpleTuner")
    draft.default(("wd",), 3.0, "SimpleTuner")
    assert draft.tree == {"lr": 1.0, "wd": 3.0}
    assert str(draft.origins[("wd",)]) == "default SimpleTuner"


def test_put_tree_gives_every_leaf_its_own_key() -> None:
    draft = Draft("f")
    draft.put_tree(("datasets",), [{"id": "a", "crop": {"style": "center"}}], Origin("file", "datasets", "f"))
    assert draft.origins[("datasets", 0, "crop", "style")].key == "datasets[0].crop.style"
    assert draft.tree == {"datasets": [{"id": "a", "crop": {"style": "center"}}]}
    assert set(draft.origins) == {("datasets", 0, "id"), ("datasets", 0, "crop", "style")}


def test_found_values_are_described_as_their_writer_knows_them() -> None:
    values = [True, None, {}, {"a": 1}, [], [1, 2], "x", 2.5, "y" * 200]
    texts = [describe(value) for value in values]
    assert texts[:8] == ["true", "nothing (null)", "an empty mapping", "a mapping with 1 keys", "an empty list",
                         "a list of 2", '"x"', "2.5"]  # fmt: skip
    assert len(texts[8]) == 80


def test_a_value_inside_another_is_named_with_its_place_in_it() -> None:
    draft = Draft("f")
    draft.put(("adapter", "targets"), ["a", 3], Origin("file", "modules", "f.json"))
    assert draft.written_key(("adapter", "targets", 1)) == ("modules[1]", "f.json")
    draft.put(("adapter",), {"targets": [3]}, Origin("flag", "--set adapter"))
    assert draft.written_key(("adapter", "targets", 0)) == ("--set adapter.targets[0]", None)


def test_our_own_words_are_not_quoted() -> None:
    assert (describe(UnquotedText("an unset variable")), describe("an unset variable")) == (
        "an unset variable",
        '"an unset variable"',
    )


@pytest.mark.parametrize(
    ("text", "shown"), [("a\nb", "a\\nb"), ("\x1b[1m", "\\x1b[1m"), ("\ud800", "\\ud800"), ("é ✓", "é ✓")]
)
def test_what_cannot_be_seen_is_written_as_an_escape(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert describe(text) == f'"{shown}"'
