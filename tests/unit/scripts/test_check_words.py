"""Each kind of wrong name fails with its file and line, and nothing else does. `make lint` checks the repository."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
GLOSSARY = """# Glossary

| say | not | meaning |
|---|---|---|
| image | `picture`, `pictures`; "picture" | a medium |
| location | `where` alone | a file and line |
| mixed half precisions | `two_halves`; "two halves" | bf16 and fp16 |

| term | meaning |
|---|---|
| `slab` | a block of memory |
"""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_words", REPOSITORY / "scripts" / "check_words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


WORDS: Any = load()


def repository(folder: Path, files: dict[str, str], *, allowed: str = "") -> Path:
    for name, text in {"docs/glossary.md": GLOSSARY, "scripts/words_allowed.txt": allowed, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    return folder


def test_this_repository_follows_its_glossary() -> None:
    assert WORDS.check(REPOSITORY) == []


@pytest.mark.parametrize(
    ("code", "line", "found"),
    [
        ("class PictureFile: ...\n", 1, "class `PictureFile` (`picture`)"),
        ("\ndef show_pictures() -> None: ...\n", 2, "function `show_pictures` (`pictures`)"),
        ("def show(*, a_picture: int) -> None: ...\n", 1, "parameter `a_picture` (`picture`)"),
        ("def show() -> None:\n    picture = 1\n", 2, "variable `picture` (`picture`)"),
        ("PICTURE_SIDE = 64\n", 1, "variable `PICTURE_SIDE` (`picture`)"),
        (
            "class A:\n    def __init__(self) -> None:\n        self._picture = 1\n",
            3,
            "attribute `_picture` (`picture`)",
        ),
        ("class A:\n    picture: int\n", 2, "variable `picture` (`picture`)"),
        ("from a import b as picture\n", 1, "imported name `picture` (`picture`)"),
        ("try: ...\nexcept OSError as picture: ...\n", 2, "variable `picture` (`picture`)"),
        ("_where = 1\n", 1, "variable `_where` (`where`)"),
        ("def reject_two_halves() -> None: ...\n", 1, "function `reject_two_halves` (`two_halves`)"),
    ],
)
def test_a_wrong_name_is_found_on_its_line(tmp_path: Path, code: str, line: int, found: str) -> None:
    root = repository(tmp_path, {"src/gracetune/a.py": code})
    (one,) = WORDS.check(root)
    assert str(one).startswith(f"src/gracetune/a.py:{line}: found {found}, expected ")


@pytest.mark.parametrize("file", ["src/gracetune/picture.py", "scripts/old_pictures.py"])
def test_a_wrong_module_name_is_found(tmp_path: Path, file: str) -> None:
    (one,) = WORDS.check(repository(tmp_path, {file: ""}))
    assert str(one).startswith(f"{file}:1: found module `")
    assert str(one).endswith("expected image")


@pytest.mark.parametrize(
    "code",
    [
        "class ImageFile: ...\n",
        "import torch\nx = torch.where(1, 2, 3)\n",  # of a library
        "where_possible = 1\n",  # `where` is ruled out alone
        "from lib import picture\nprint(picture)\n",  # the name is another package's
        "x = {'picture': 1}\n",  # data
        "def test_a_picture_is_read() -> None: ...\n",  # a sentence
    ],
)
def test_other_names_stay(tmp_path: Path, code: str) -> None:
    assert WORDS.check(repository(tmp_path, {"src/gracetune/a.py": code})) == []


def test_two_public_classes_of_one_name_are_found(tmp_path: Path) -> None:
    code = "class Job: ...\nclass _Part: ...\n"
    root = repository(tmp_path, {"src/gracetune/a.py": code, "src/gracetune/b.py": code, "tests/c.py": code})
    assert [str(one) for one in WORDS.check(root)] == [
        "src/gracetune/b.py:1: found class `Job`, expected a name of its own: src/gracetune/a.py:1 has this one"
    ]


class TestAllowed:
    CODE = {"src/gracetune/a.py": "picture = 1\n"}  # noqa: RUF012

    def test_with_a_reason_it_stays(self, tmp_path: Path) -> None:
        row = "src/gracetune/*.py  picture  a key of the file format\n"
        assert WORDS.check(repository(tmp_path, self.CODE, allowed=row)) == []

    def test_a_phrase_stays_too(self, tmp_path: Path) -> None:
        files = {"src/gracetune/a.py": "# the two halves of a tensor\n"}
        (one,) = WORDS.check(repository(tmp_path, files))
        assert str(one) == 'src/gracetune/a.py:1: found "two halves", expected mixed half precisions'
        assert WORDS.check(repository(tmp_path, files, allowed='src/*/a.py  "two halves"  of a tensor\n')) == []

    def test_without_a_reason_the_check_ends(self, tmp_path: Path) -> None:
        with pytest.raises(SystemExit, match=r"words_allowed\.txt:2: found no reason"):
            WORDS.check(repository(tmp_path, self.CODE, allowed="# rows\nsrc/gracetune/a.py picture\n"))

    def test_a_row_that_is_not_needed_fails(self, tmp_path: Path) -> None:
        (one,) = WORDS.check(repository(tmp_path, {}, allowed="src/a.py  picture  gone\n"))
        assert "src/a.py picture" in str(one)


class TestPhrases:
    GLOSSARY = WORDS.read_glossary(GLOSSARY)

    @pytest.mark.parametrize(
        ("file", "text", "lines"),
        [
            ("a.py", '"""A picture."""\n', [1]),
            ("a.py", "# Two\n# halves and two halves\n", [2]),
            ("a.py", 'def f() -> str:\n    """x\n\n    Its Picture.\n    """\n    return "no picture here"\n', [4, 6]),
            ("a.md", "One picture.\n```\npicture\n```\n`picture` or a-picture\n", [1]),
            ("a.py", 'key = "picture"\n', []),
            ("a.py", "# a PICTURE of another program\n", []),
            (
                "tests/a.py",
                'def f() -> str:\n    """A picture."""\n    return "no picture here"  # a picture\n',
                [2, 3],
            ),
            ("a.py", "x = 1  # the `picture` key\n", []),
            ("a.py", 'x = f"{picture.size} of it"\n', []),
        ],
    )
    def test_are_found_in_text_and_not_in_code(self, file: str, text: str, lines: list[int]) -> None:
        assert [one.line for one in WORDS.check_phrases(file, text, self.GLOSSARY)] == lines
