"""Parses JSON (with comments and trailing commas), YAML, TOML and env files to plain data.

Errors have line and column.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gracetune.config.draft import dotted
from gracetune.config.limits import (
    DEEPEST,
    LARGEST_FILE,
    LONGEST_NAME,
    LONGEST_TEXT,
    MOST_VALUES,
    NotPlainError,
    joined,
    substituted,
    too_deep,
    too_large,
    too_long,
    too_many_values,
)
from gracetune.config.plain_data import plain
from gracetune.config.spelling import nearest
from gracetune.config.yaml_syntax import UNREADABLE, DuplicateKeyError, parse_yaml
from gracetune.errors import ConfigError, Problem

FORMATS = {
    ".json": "JSON",
    ".jsonc": "JSON",
    ".yaml": "YAML",
    ".yml": "YAML",
    ".toml": "TOML",
    ".env": "env",
}


@dataclass(frozen=True)
class Document:
    """A configuration file: its text, and its data once parsed."""

    path: Path
    format: str
    text: str
    data: Any
    problems: tuple[Problem, ...] = ()
    """Problems with values that are not plain data. They are None in `data`, so that the rest can be checked."""

    @property
    def name(self) -> str:
        return str(self.path)

    def reparsed(self, text: str | None = None) -> Document:
        """Parse the file's text, or `text`, its text with variables substituted."""
        text = self.text if text is None else text
        data, problems = _parse(text, self.format, self.name)
        return Document(self.path, self.format, text, data, problems)


def read_document(path: Path) -> Document:
    return open_document(path).reparsed()


def open_document(path: Path) -> Document:
    """Read a file without parsing it: `data` is None."""
    file_format = FORMATS.get(path.suffix.lower())
    text = _read_text(path)
    if file_format is None:
        raise _cannot_read(path, f"a file ending in {path.suffix or 'nothing'}", f"one of {', '.join(FORMATS)}",
                           "rename the file after what it holds")  # fmt: skip
    return Document(path, file_format, text, None)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:  # the limit on what is read also holds for a device or a pipe
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise _shapeless(str(path), too_large())
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise _cannot_read(path, "no file there", "a configuration file", _nearest_file(path)) from None
    except IsADirectoryError:
        raise _cannot_read(path, "a directory", "a configuration file", _in_place_of(path)) from None
    except UnicodeDecodeError as error:
        raise _cannot_read(path, f"byte {error.start} is not UTF-8", "UTF-8 text", "save the file as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) else None
        raise _cannot_read(path, reason or str(error), "a readable file", _unreadable(path, error)) from None


def _nearest_file(missing: Path) -> str:
    """Suggest the config file or the folder of the most similar name."""
    folder = missing.parent
    if not folder.is_dir():
        return f"check the spelling; {folder} does not exist"
    with contextlib.suppress(OSError):  # a folder that cannot be listed
        found = [one for one in sorted(folder.iterdir(), key=Path.is_file) if one.suffix in FORMATS or one.is_dir()]
        names = {one.stem: one.name for one in found}  # a file rather than a folder of the same name
        near = nearest(missing.stem, names)
        if near is not None:
            return f"check the spelling: {folder / names[near]} exists"
    return f"check the spelling; {folder} holds no such file"


def _in_place_of(folder: Path) -> str:
    """Suggest the config that was probably meant by a folder: a run's own, or the one for the images in it."""
    beside = folder.resolve().with_suffix(".yaml") if not folder.suffix else folder.resolve()
    if (folder / "config.yaml").is_file():
        return f"name a file inside {folder}: {folder / 'config.yaml'}"
    if beside.is_file():
        return f"the config beside it: {folder.parent / beside.name}"
    return f"name a file inside {folder}; for a folder of images: gracetune init {shlex.quote(str(folder))}"


def _unreadable(path: Path, error: OSError | ValueError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EACCES, errno.EPERM):
        return f"check its permissions: ls -l {path}"
    if number == errno.ELOOP:
        return f"the link leads back to itself: ls -l {path}"
    return "shorten the name" if number == errno.ENAMETOOLONG else "check the path"


def _cannot_read(path: Path, found: str, expected: str, hint: str) -> ConfigError:
    return ConfigError([Problem("(file)", found, expected, hint, str(path))])


def _parse(text: str, file_format: str, file: str) -> tuple[Any, tuple[Problem, ...]]:
    parse = {"JSON": _parse_json, "YAML": _parse_yaml, "TOML": _parse_toml, "env": parse_env}[file_format]
    try:
        data, invalid = plain(parse(joined([text]), file))
    except RecursionError:
        raise _shapeless(file, too_deep()) from None
    except NotPlainError as error:
        raise _shapeless(file, error) from None
    return data, tuple(
        Problem(dotted(one.path) or "(file)", one.found, one.expected, one.hint, file) for one in invalid
    )


def _shapeless(file: str, error: NotPlainError) -> ConfigError:
    return ConfigError([Problem("(file)", error.found, error.expected, error.hint, file)])


def _broken(file: str, file_format: str, location: str, found: str, hint: str = "") -> Problem:
    hint = hint or (f"fix the {file_format} there" if location else f"fix the {file_format}")
    return Problem(location or "(file)", found, f"valid {file_format}", hint, file)


def _unreadable_value(file: str, file_format: str, error: Exception) -> Problem:
    """Report a parser's error that has no position. Python's own message about long numbers is not for users."""
    if "digits" in str(error):
        return _broken(file, file_format, "", "a number of thousands of digits", "shorten the number")
    return _broken(file, file_format, "", f"a value that cannot be read ({error})")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise DuplicateKeyError(key)
        seen[key] = value
    return seen


_STRING = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"?'
"""A string, closed or not. Matching an unclosed one too avoids backtracking, and so quadratic time."""
_STRING_OR_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_STRING_OR_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.DOTALL)


def _strict_json(text: str) -> str:
    """Replace comments and trailing commas with blanks, which keeps line and column of everything else."""

    def blank(match: re.Match[str]) -> str:
        text_part = match[0]
        is_open = text_part.startswith("/*") and not text_part.endswith("*/")
        return text_part if text_part.startswith('"') or is_open else re.sub(r"[^\n]", " ", text_part)

    return _STRING_OR_TRAILING_COMMA.sub(blank, _STRING_OR_COMMENT.sub(blank, text))


def _parse_json(text: str, file: str) -> Any:
    if not text.strip():
        return None
    strict = _strict_json(text)
    try:
        return json.loads(strict, object_pairs_hook=_reject_duplicates)
    except json.JSONDecodeError as error:
        location = f"line {error.lineno}, column {error.colno}"
        raise ConfigError([_broken(file, "JSON", location, error.msg)]) from None
    except DuplicateKeyError as error:
        raise ConfigError([_twice(file, error.key, _json_line(strict))]) from None
    except ValueError as error:  # a number of more digits than Python converts
        raise ConfigError([_unreadable_value(file, "JSON", error)]) from None


_KEY_OR_BRACE = re.compile(r'("(?:\\.|[^"\\])*")(\s*:)?|[{}]')


def _json_line(text: str) -> int:
    """Return the line of the first duplicate key. The text must have one."""
    objects: list[set[str]] = []
    for token in _KEY_OR_BRACE.finditer(text):
        if token[0] == "{":
            objects.append(set())
        elif token[0] == "}":
            objects.pop()
        elif token[2] is not None:
            key = json.loads(token[1])
            if key in objects[-1]:
                return text.count("\n", 0, token.start()) + 1
            objects[-1].add(key)
    raise ValueError("no key stands twice")


def _twice(file: str, key: str, line: int) -> Problem:
    name = key[:LONGEST_NAME] or '""'
    return Problem(name, f"the key twice, again at line {line}", "each key once", f"keep one of the two `{name}`", file)


def _parse_yaml(text: str, file: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        found = (error.problem or "unreadable text").removeprefix("found ")
        raise ConfigError([_broken(file, "YAML", location, found, _yaml_hint(found))]) from None
    except NotPlainError:
        raise
    except DuplicateKeyError as error:
        raise ConfigError([_twice(file, error.key, error.line)]) from None
    except UNREADABLE as error:
        raise ConfigError([_unreadable_value(file, "YAML", error)]) from None


def _yaml_hint(problem: str) -> str:
    if r"'\t'" in problem:
        return "indent with spaces; YAML takes no tabs there"
    if "another document" in problem:
        return "keep one document: what follows the second `---` belongs in a file of its own"
    return ""


_TOML_KEY = re.compile(
    r""""{3}(?:\\.?|[^\\])*?(?:"{3,5}|\Z)|\'{3}.*?(?:\'{3,5}|\Z)"""
    r"""|"[^"\\\n]*(?:\\.[^"\\\n]*)*"?|\'[^\'\n]*\'?|\#[^\n]*|(?P<dot>\.)|(?P<end>[=,\n\[\]{}])""",
    re.DOTALL,
)
"""Matches strings and comments, to skip them, and outside them dots and the characters that end a key."""


def _reject_long_toml_keys(text: str) -> None:
    """Reject keys with many dots: each part is a table, for which the parser stores the whole key up to that part."""
    dots = 0
    for token in _TOML_KEY.finditer(text):
        dots = dots + 1 if token["dot"] else 0 if token["end"] else dots
        if dots >= DEEPEST:
            raise too_deep()


def _parse_toml(text: str, file: str) -> Any:
    _reject_long_toml_keys(text)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        position = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
        location = f"line {position[1]}, column {position[2]}" if position and position[1] else "end of file"
        raise ConfigError([_broken(file, "TOML", location, str(error).split(" (at ")[0])]) from None
    except ValueError as error:  # a number of more digits than Python converts, an impossible date
        raise ConfigError([_unreadable_value(file, "TOML", error)]) from None


_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)(\+?)=(.*)")
_REFERENCE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def parse_env(text: str, file: str, variable: Callable[[str], str | None] | None = None) -> dict[str, str]:
    """Parse assignments as a shell does: `export`, quotes, comments, `+=`.

    With `variable`, `$NAME` is replaced by the value of an earlier line, or else by `variable(NAME)`. Without it, such
    names stay as written.
    """
    values: dict[str, str] = {}
    assignments = 0

    def expanded(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        return found[0] if variable is None else values.get(name, variable(name) or "")

    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, adds, written, column = _assignment(line, number, file)
        try:
            value = " ".join(shlex.split(written, comments=True))
        except ValueError as error:
            raise ConfigError([_broken(file, "env", f"line {number}, column {column}", str(error))]) from None
        value = value if written.lstrip().startswith("'") else substituted(_REFERENCE, expanded, value)
        values[name] = joined([values.get(name, ""), value], LONGEST_TEXT) if adds else value
        assignments += 1
        if assignments > MOST_VALUES:
            raise too_many_values("check that this is the right file")
    return values


def _assignment(line: str, number: int, file: str) -> tuple[str, bool, str, int]:
    """Split a line into the name, whether it appends (`+=`), the text after the `=`, and the column of that text."""
    if len(line) > LONGEST_TEXT:
        raise too_long()
    match = _ASSIGNMENT.fullmatch(line)
    if match is None:
        hint = "write NAME=VALUE, without blanks around the sign"
        raise ConfigError([_broken(file, "env", f"line {number}, column 1", line.strip()[:60], hint)])
    name, adds, written = match.groups()
    return name, bool(adds), written, match.start(3) + 1
