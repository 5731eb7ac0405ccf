from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.data.backends.paths import checked, is_hidden, rejection, suffix_of
from gracetune.data.errors import OutsideRootError


@pytest.mark.parametrize(
    "path", ["a.jpg", "a/b.jpg", "ä/日本.png", "a b/c'd.txt", "..a/b..", "a:b.jpg", "C:x.jpg", "\n"]
)
def test_a_path_below_a_root(path: str) -> None:
    assert checked(path, "root") == path


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "empty"),
        ("a\0b", "NUL"),
        ("a\\b", "backslash"),
        ("..\\b", "backslash"),
        ("/etc/passwd", "absolute"),
        ("//etc", "absolute"),
        ("C:/x", "absolute"),
        ("..", "'..'"),
        ("a/../b", "'..'"),
        ("./a", "'.'"),
        ("a//b", "empty part"),
        ("a/", "empty part"),
        ("\udcff.jpg", "UTF-8"),
    ],
)
def test_invalid_paths_are_rejected_with_the_reason(path: str, why: str) -> None:
    with pytest.raises(OutsideRootError, match="root") as rejected:
        checked(path, "root")
    assert why in str(rejected.value)
    str(rejected.value).encode()  # the message itself can be printed


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="/\\\0", exclude_categories=["Cs"]), min_size=1)))
def test_any_names_joined_are_a_path_unless_one_is_a_dot(parts: list[str]) -> None:
    path = "/".join(parts)
    rejected = rejection(path) is not None
    assert rejected == (not parts or bool({".", ".."} & set(parts)) or (path[1:3] == ":/" and path[0].isascii()))


@pytest.mark.parametrize(
    ("path", "suffix"),
    [
        ("a.JPG", ".jpg"),
        ("a/b.c/d", ""),
        (".txt", ""),
        ("a.tar.GZ", ".gz"),
        ("a.", ""),
        ("..jpg", ""),
        ("日.Png", ".png"),
    ],
)
def test_suffix(path: str, suffix: str) -> None:
    assert suffix_of(path) == suffix


def test_hidden() -> None:
    assert [path for path in ("a.jpg", "._a.jpg", ".git/x", "a/.b/c.jpg", "a./b") if is_hidden(path)] == [
        "._a.jpg",
        ".git/x",
        "a/.b/c.jpg",
    ]
