"""Captions: sources and processing."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.config.dataset_config import Captions
from gracetune.data.captions import (
    CaptionBook,
    KohyaFolder,
    WrittenCaption,
    caption_ref,
    from_filename,
    is_dropped,
    kohya_folder,
    lines,
    open_captions,
    shuffles,
    with_trigger,
)
from gracetune.data.errors import UnreadableMediaError
from gracetune.errors import ConfigError
from unit.data.media.generated import DictBackend

WORDS = st.text(st.characters(categories=["L", "Nd"]), min_size=1, max_size=6)
TAGS = st.lists(WORDS, min_size=1, max_size=8)


def book(files: dict[str, bytes] | None = None, **options: Any) -> CaptionBook:
    return open_captions(Captions(**options), DictBackend(files or {}), "datasets[0].captions")


def test_a_text_file_next_to_the_image() -> None:
    captions = book({"cats/one.txt": b"a cat \n", "two.TXT": b"a dog"})
    assert captions.find("cats/one.jpg") == WrittenCaption(("a cat",), "own")
    assert captions.find("two.png") == WrittenCaption(("a dog",), "own")


def test_another_extension() -> None:
    files = {"one.caption": b"a cat", "one.txt": b"a dog", "v1.2.caption": b"a bird"}
    for extension in ("caption", ".caption"):
        captions = book(files, extension=extension)
        assert captions.find("one.jpg").texts == ("a cat",)
        assert captions.find("v1.2.jpg").texts == ("a bird",)


def test_lines_are_captions_of_their_own_or_one() -> None:
    text = "a cat\r\n\n  a black cat  \r\n"
    assert lines(text, True) == ("a cat", "a black cat")
    assert lines(text, False) == ("a cat\n\n  a black cat",)
    assert lines("\n\n", True) == ("",)


def test_a_byte_order_mark_and_every_script() -> None:
    captions = book({"a.txt": b"\xef\xbb\xbf" + "naïve 猫 🐈".encode()})
    assert captions.find("a.png").texts == ("naïve 猫 🐈",)


@pytest.mark.parametrize(("data", "reason"), [
    ("café".encode("latin-1"), r"not UTF-8 \(byte 0xe9 at position 3\); save it as UTF-8"),
    ("a cat".encode("utf-16"), "a caption in UTF-16; save it as UTF-8"),
])  # fmt: skip
def test_a_caption_that_is_not_utf8_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableMediaError, match=rf"^cats/one\.txt: .*{reason}") as caught:
        book({"cats/one.txt": data}).find("cats/one.png")
    assert caught.value.path == "cats/one.txt"


def test_a_missing_caption_has_the_origin_missing() -> None:
    assert book().find("a.png") == WrittenCaption(("",), "missing")
    assert book().find("a.png", folder_name="sks dog") == WrittenCaption(("sks dog",), "folder")
    assert book(default="a picture").find("a.png", folder_name="sks dog") == WrittenCaption(("a picture",), "default")
    assert book({"a.txt": b" \n"}, default="a picture").find("a.png") == WrittenCaption(("",), "empty")


def test_file_names_as_captions() -> None:
    assert from_filename("cats/a_black_cat_.v2.jpg") == "a black cat .v2"
    assert book(strategy="filename").find("cats/a_cat.png") == WrittenCaption(("a cat",), "own")


def test_one_prompt_for_all() -> None:
    captions = book({"a.txt": b"ignored"}, strategy="instanceprompt", instance_prompt="a photo of sks, red")
    found = captions.find("a.png")
    assert found == WrittenCaption(("a photo of sks, red",), "own")
    assert captions.variants(found, 1) == ("a photo of sks, red",)
    assert book(strategy="instanceprompt", instance_prompt="").find("a.png") == WrittenCaption(("",), "own")


def test_the_instance_prompt_in_front() -> None:
    captions = book({"a.txt": b"a cat\na dog"}, prepend_instance_prompt=True, instance_prompt="photo of")
    assert captions.variants(captions.find("a.png"), 1) == ("photo of a cat", "photo of a dog")
    assert captions.variants(captions.find("b.png"), 1) == ("photo of",)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"strategy": "instanceprompt"}, "instance_prompt"),
        ({"prepend_instance_prompt": True}, "instance_prompt"),
        ({"strategy": "csv"}, "table"),
        ({"shuffle_tags": True, "tag_separator": ""}, "tag_separator"),
    ],
)
def test_incomplete_options(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        book(**options)
    assert [problem.key for problem in caught.value.problems] == [f"datasets[0].captions.{key}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[trigger] on a chair", "sks on a chair"),
        ("a photo of [trigger]", "a photo of sks"),
        ("a dog", "sks a dog"),
        ("sks, a dog", "sks, a dog"),
        ("she asks for tasks", "sks she asks for tasks"),
        ("", "sks"),
        ("[trigger] and [trigger]", "sks and sks"),
    ],
)
def test_the_trigger_word(text: str, expected: str) -> None:
    assert with_trigger(text, "sks") == expected
    assert with_trigger(text, " sks ") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[trigger], a dog", "a dog"),
        ("a photo of [trigger] on a chair", "a photo of on a chair"),
        ("red, [trigger], blue", "red, blue"),
        ("red, [trigger]", "red"),
        ("[trigger]", ""),
        ("a  dog , ", "a  dog , "),
    ],
)
def test_without_a_trigger_word_the_placeholder_is_removed(text: str, expected: str) -> None:
    assert with_trigger(text, None) == expected
    assert with_trigger(text, "") == expected


@given(WORDS, TAGS, st.none() | st.integers(0, 8))
def test_the_trigger_appears_exactly_once(trigger: str, tags: list[str], place: int | None) -> None:
    tags = [tag for tag in tags if tag != trigger]
    if place is not None:
        tags.insert(place, "[trigger]")
    found = with_trigger(", ".join(tags), trigger)
    assert found.replace(",", " ").split().count(trigger) == 1
    assert "[trigger]" not in found


def test_a_trigger_inside_the_instance_prompt_is_not_added_again() -> None:
    options = {"prepend_instance_prompt": True, "instance_prompt": "a photo of [trigger],", "trigger_word": "sks"}
    captions = book({"a.txt": b"red"}, **options)
    assert captions.variants(captions.find("a.png"), 1) == ("a photo of sks, red",)


def shuffling(keep: int = 0, variants: int = 1, separator: str = ",") -> Captions:
    return Captions(shuffle_tags=True, keep_tags=keep, shuffle_variants=variants, tag_separator=separator)


@given(TAGS, st.integers(0, 9), st.integers(1, 6), st.sampled_from([",", " ", ".", ";"]), st.integers(0, 2**31))
def test_shuffling_is_a_permutation_that_keeps_the_first_tags(
    tags: list[str], keep: int, variants: int, separator: str, seed: int
) -> None:
    text = (separator + " ").join(tags)
    found = shuffles(text, shuffling(keep, variants, separator), seed)
    assert found[0] == text
    assert len(set(found)) == len(found) <= variants + 1
    for variant in found[1:]:
        order = [tag.strip() for tag in variant.split(separator) if tag.strip()]
        assert Counter(order) == Counter(tags)
        assert order[:keep] == tags[:keep]
        assert order != tags


@given(TAGS, st.integers(0, 2**31), st.integers(1, 5))
def test_variants_are_the_same_every_time(tags: list[str], seed: int, variants: int) -> None:
    options, text = shuffling(variants=variants), ", ".join(tags)
    assert shuffles(text, options, seed) == shuffles(text, options, seed)


def test_captions_are_not_all_shuffled_alike() -> None:
    texts = [", ".join(letter + str(place) for place in range(6)) for letter in "abcdefgh"]
    orders = {shuffles(text, shuffling(), 1)[1].replace(text[0], "") for text in texts}
    assert len(orders) > 4


def test_as_many_variants_as_asked_for_or_as_there_are() -> None:
    assert len(shuffles("a, b, c, d, e", shuffling(variants=7), 1)) == 8
    assert set(shuffles("a, b, c", shuffling(variants=99), 1)) == {
        "a, b, c", "a, c, b", "b, a, c", "b, c, a", "c, a, b", "c, b, a"
    }  # fmt: skip
    assert set(shuffles("x, a, b", shuffling(keep=1, variants=99), 1)) == {"x, a, b", "x, b, a"}
    assert shuffles("a, a", shuffling(variants=5), 1) == ("a, a",)
    assert shuffles("one sentence", shuffling(variants=5), 1) == ("one sentence",)
    assert shuffles("", shuffling(variants=5), 1) == ("",)


def test_the_order_as_written_may_be_left_to_chance() -> None:
    options = Captions(shuffle_tags=True, shuffle_variants=3, shuffle_written=False)
    first = Counter(shuffles("a, b, c", options, seed)[0] for seed in range(1200))
    assert len(first) == 6
    assert all(count == pytest.approx(200, rel=0.3) for count in first.values())
    assert len(shuffles("a, b, c", options, 1)) == 3
    assert shuffles("one sentence", options, 1) == ("one sentence",)


def test_visits_take_their_orders_in_turn_until_a_hundred_are_used_up() -> None:
    options = Captions(shuffle_tags=True, shuffle_variants="visits", shuffle_written=False, split_lines=False)
    text = ", ".join("abcdefgh")
    short, long = (shuffles(text, options, 1, visits=visits) for visits in (7, 5000))
    assert (len(short), len(long)) == (7, 100)
    assert long[:7] == short  # a longer run begins as a shorter one
    taken = [caption_ref(long, options, 1, 3, visit=visit).text for visit in range(250)]
    assert taken[:100] == [*long] == taken[100:200]


def test_lines_are_visited_in_turn_too() -> None:
    captions = book({"a.txt": b"a, b, c, d\nu, v, w, x"}, shuffle_tags=True, shuffle_variants="visits")
    found = captions.variants(captions.find("a.png"), 1, visits=5)
    assert [text[0] in "abcd" for text in found[2:]] == [True, False] * 5


def test_a_trigger_word_may_move_with_a_tag() -> None:
    options = {"shuffle_tags": True, "shuffle_variants": 60, "shuffle_written": False, "trigger_word": "sks"}
    captions = book({"a.txt": b"a, b, c"}, **options, shuffle_trigger=True)
    found = captions.variants(captions.find("a.png"), 1)
    assert len(found) == 18  # each of six orders with the word in front of one of three tags
    assert {text.split(", ").index(tag) for text in found for tag in text.split(", ") if "sks" in tag} == {0, 1, 2}
    captions = book({"a.txt": b"a, b, c"}, **options)
    assert all(text.startswith("sks ") for text in captions.variants(captions.find("a.png"), 1))


def test_a_trigger_word_that_is_not_added_still_fills_its_place() -> None:
    captions = book({"a.txt": b"a [trigger]", "b.txt": b"a cat"}, trigger_word="sks", add_trigger=False)
    assert captions.variants(captions.find("a.png"), 1) == ("a sks",)
    assert captions.variants(captions.find("b.png"), 1) == ("a cat",)


def test_an_empty_caption_may_take_the_default_too() -> None:
    files = {"a.txt": b" \n", "b.txt": b"own"}
    for requested, expected in ((False, WrittenCaption(("",), "empty")), (True, WrittenCaption(("x",), "default"))):
        captions = book(files, default="x", default_for_empty=requested)
        assert captions.find("a.png") == expected
        assert captions.find("b.png") == WrittenCaption(("own",), "own")
        assert captions.find("c.png") == WrittenCaption(("x",), "default")


def test_every_order_is_equally_likely() -> None:
    counts = Counter(shuffles("a, b, c", shuffling(), seed)[1] for seed in range(3000))
    assert len(counts) == 5
    assert all(count == pytest.approx(600, rel=0.15) for count in counts.values())


def test_the_order_of_caption_processing() -> None:
    captions = book(
        {"a.txt": b"one, two, three\nfour"},
        shuffle_tags=True,
        shuffle_variants=2,
        prepend_instance_prompt=True,
        instance_prompt="photo,",
        trigger_word="sks",
    )
    found = captions.variants(captions.find("a.png"), 7)
    assert found[0] == "sks photo, one, two, three"
    assert found[-1] == "sks photo, four"
    assert len(found) == 4
    assert all(text.startswith("sks photo, ") for text in found)


@settings(max_examples=25, deadline=None)
@given(st.floats(0, 1), st.integers(0, 2**63))
def test_dropout_converges_to_its_rate(rate: float, seed: int) -> None:
    dropped = sum(is_dropped(rate, seed, index) for index in range(4000))
    assert dropped / 4000 == pytest.approx(rate, abs=0.05)


def test_dropout_depends_on_seed_and_index_alone() -> None:
    pattern = [is_dropped(0.5, 1, index) for index in range(200)]
    assert pattern == [is_dropped(0.5, 1, index) for index in range(200)]
    assert pattern != [is_dropped(0.5, 2, index) for index in range(200)]
    assert not any(is_dropped(0.0, 1, index) for index in range(200))
    assert all(is_dropped(1.0, 1, index) for index in range(200))


def test_a_caption_ref_names_its_variant() -> None:
    variants = ("a cat", "a black cat", "a small cat")
    options = Captions(dropout=0.25, dropped_caption="sks ")
    refs = [caption_ref(variants, options, 1, index, visit=0) for index in range(2000)]
    kept = [ref for ref in refs if not ref.dropped]
    assert len(kept) / len(refs) == pytest.approx(0.75, abs=0.05)
    assert all(ref.text == variants[ref.variant] for ref in kept)
    assert all((ref.text, ref.variant) == ("sks ", 0) for ref in refs if ref.dropped)
    assert all(count == pytest.approx(500, rel=0.2) for count in Counter(ref.variant for ref in kept).values())
    # A draw of its own: dropped or not says nothing about which variant.
    assert {caption_ref(variants, Captions(), 1, index, visit=0).variant for index in range(50)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("10_sks dog", KohyaFolder(10, "sks dog")),
        ("1_a_b_c", KohyaFolder(1, "a_b_c")),
        ("0_left out", KohyaFolder(0, "left out")),
        ("007_bond", KohyaFolder(7, "bond")),
        ("sks dog", None),
        ("10_", None),
        ("10_ ", None),
        ("10", None),
        ("_dog", None),
        ("-3_dog", None),
        ("1.5_dog", None),
        ("12345678_dog", None),
    ],
)
def test_kohya_folders(name: str, expected: KohyaFolder | None) -> None:
    assert kohya_folder(name) == expected


class TestLimits:
    """Input far beyond a caption is an immediate error, not minutes of work."""

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("x" * 10_000_000, "a caption file of 9.54 MiB; expected text of at most 512 KiB"),
            ("tag, " * 50_000, "a caption of 249,999 characters; expected at most 32,768"),
            ("line\n" * 1_001, "1,001 captions for one file; expected at most 1,000"),
        ],
    )
    def test_a_file_too_large_for_a_caption(self, text: str, found: str) -> None:
        with pytest.raises(UnreadableMediaError, match=re.escape(found)):
            book({"a.txt": text.encode()}).find("a.jpg")

    def test_the_longest_caption_is_made_into_variants_in_no_time(self) -> None:
        options = Captions(shuffle_tags=True, shuffle_variants=5)
        for text in (", ".join(map(str, range(5_500))), "a," * 16_000, "a,b," * 8_000, "a" * 32_768):
            began = time.perf_counter()
            assert len(shuffles(text, options, seed=1)) == (1 if len({*text.split(",")} - {""}) == 1 else 6)
            assert time.perf_counter() - began < 2
        for text in (f"[trigger]{' ' * 32_000}x", f"[trigger]{', ' * 16_000}", f"[trigger]{' ,' * 16_000}x"):
            began = time.perf_counter()
            assert "," not in with_trigger(text, None) or text.endswith("x")
            assert time.perf_counter() - began < 2

    def test_a_trigger_word_has_a_maximum_length(self) -> None:
        with pytest.raises(ConfigError, match=r"captions\.trigger_word"):
            book(trigger_word="x" * 1_001)
