"""Text to plain data: JSON (comments and trailing commas forgiven), YAML, TOML and env files, with line and column."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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
    """A configuration file as it was written."""

    path: Path
    format: str
    text: str
    data: Any

    @property
    def name(self) -> str:
        return str(self.path)

    def reparsed(self, text: str | None = None) -> Document:
        """The same file parsed, as it stands or after its text was substituted into."""
        text = self.text if text is None else text
        return Document(self.path, self.format, text, _parse(text, self.format, str(self.path)))


def read_document(path: Path) -> Document:
    return open_document(path).reparsed()


def open_document(path: Path) -> Document:
    """The text of a file, not yet parsed: its data is None."""
    file_format = FORMATS.get(path.suffix.lower())
    text = _read_text(path)
    if file_format is None:
        raise _cannot_read(path, f"a file ending in {path.suffix or 'nothing'}", f"one of {', '.join(FORMATS)}",
                           "rename the file after what it holds")  # fmt: skip
    return Document(path, file_format, text, None)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        hint = f"check the spelling; {path.parent} {'holds no such file' if path.parent.is_dir() else 'does not exist'}"
        raise _cannot_read(path, "no file there", "a configuration file", hint) from None
    except IsADirectoryError:
        raise _cannot_read(path, "a directory", "a configuration file", f"name a file inside {path}") from None
    except UnicodeDecodeError as error:
        raise _cannot_read(path, f"byte {error.start} is not UTF-8", "UTF-8 text", "save the file as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise _cannot_read(path, str(error), "a readable file", f"check its permissions: ls -l {path}") from None


def _cannot_read(path: Path, found: str, expected: str, hint: str) -> ConfigError:
    return ConfigError([Problem("(file)", found, expected, hint, str(path))])


def _parse(text: str, file_format: str, file: str) -> Any:
    parse = {"JSON": _parse_json, "YAML": _parse_yaml, "TOML": _parse_toml, "env": _parse_env}[file_format]
    try:
        return parse(text, file)
    except RecursionError:
        raise ConfigError([_broken(file, file_format, "", "nesting deeper than any configuration needs")]) from None


def _broken(file: str, file_format: str, where: str, found: str) -> Problem:
    hint = f"mend the {file_format} there" if where else f"mend the {file_format}"
    return Problem(where or "(file)", found, f"valid {file_format}", hint, file)


class DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise DuplicateKeyError(key)
        seen[key] = value
    return seen


_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_STRING_OR_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def _strict_json(text: str) -> str:
    """Comments and trailing commas become blanks, so that line and column of everything else stay."""

    def blank(match: re.Match[str]) -> str:
        piece = match[0]
        return piece if piece.startswith('"') else re.sub(r"[^\n]", " ", piece)

    return _STRING_OR_TRAILING_COMMA.sub(blank, _STRING_OR_COMMENT.sub(blank, text))


def _parse_json(text: str, file: str) -> Any:
    try:
        return json.loads(_strict_json(text), object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError([_broken(file, "JSON", where, error.msg)]) from None
    except DuplicateKeyError as error:
        raise ConfigError([_twice(file, error.key)]) from None
    except ValueError as error:  # a number of more digits than Python converts
        raise ConfigError([_broken(file, "JSON", "", str(error))]) from None


def _twice(file: str, key: str, where: str = "") -> Problem:
    return Problem(key, f"the key twice{where}", "each key once", f"keep one of the two `{key}`", file)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as text; everyone who writes it means a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for (key, _), name in zip(node.value, keys, strict=False):
            if keys.count(name) > 1 and key.tag != "tag:yaml.org,2002:merge":
                mark = key.start_mark
                raise _DuplicateYamlKeyError(name, f", again at line {mark.line + 1}")
        return mapping


class _DuplicateYamlKeyError(DuplicateKeyError):
    def __init__(self, key: str, where: str) -> None:
        super().__init__(key)
        self.where = where


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back as the same value, one value a line."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        # Line breaks (U+0085 is one to YAML) and whatever else cannot be seen are written as escapes.
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def one_line_yaml(value: Any) -> str:
    """A value on one line, readable back to the same value."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=2**31, sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").rstrip("\n")


def parse_scalar(text: str) -> Any:
    """A value typed on the command line, read as YAML: `4`, `1e-4`, `true`, `[a, b]`; anything unreadable is text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError):
        return text


def _parse_yaml(text: str, file: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError([_broken(file, "YAML", where, error.problem or "unreadable text")]) from None
    except _DuplicateYamlKeyError as error:
        raise ConfigError([_twice(file, error.key, error.where)]) from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        # ValueError: an impossible date such as 2025-13-40; TypeError: a list used as a key
        raise ConfigError([_broken(file, "YAML", "", str(error))]) from None


def _parse_toml(text: str, file: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
        where = f"line {place[1]}, column {place[2]}" if place and place[1] else "end of file"
        raise ConfigError([_broken(file, "TOML", where, str(error).split(" (at ")[0])]) from None


_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)")


def _parse_env(text: str, file: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _ASSIGNMENT.fullmatch(line)
        if match is None:
            raise ConfigError([_broken(file, "env", f"line {number}, column 1", line.strip()[:60])])
        try:
            words = shlex.split(match[2], comments=True)
        except ValueError as error:
            raise ConfigError(
                [_broken(file, "env", f"line {number}, column {match.start(2) + 1}", str(error))]
            ) from None
        values[match[1]] = " ".join(words)
    return values
