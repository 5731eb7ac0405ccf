"""Write a proposal as a YAML config of some twenty lines, with the reasons as comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gracetune.config.native import VERSION, VERSION_KEY
from gracetune.config.yaml_syntax import one_line_yaml
from gracetune.errors import visible
from gracetune.proposal.proposal import Comments, Proposal

_WIDE = 90
"""A section goes on one line if it fits into this many characters."""
_SHORT = 2
"""A list entry goes on one line if it has at most this many keys."""
Path = tuple[str | int, ...]


def text_of(proposal: Proposal, header: list[str]) -> str:
    lines = [*((f"# {visible(line)}", "") for line in header), (f"{VERSION_KEY}: {VERSION}", "")]
    for key, value in proposal.values.items():
        lines += _lines(key, value, (key,), "", proposal.comments)
    return "".join(f"{text}  # {visible(comment)}\n" if comment else f"{text}\n" for text, comment in lines)


def _lines(key: str, value: Any, path: Path, indent: str, comments: Comments) -> Iterator[tuple[str, str]]:
    comment = comments.get(path, "")
    inline = f"{indent}{key}: {one_line_yaml(value)}"
    has_inner_comment = any(place[: len(path)] == path and len(place) > len(path) for place in comments)
    if not isinstance(value, dict | list) or (
        len(inline) <= _WIDE and not has_inner_comment and not _is_list_of_mappings(value)
    ):
        yield inline, comment
    elif isinstance(value, dict):
        yield f"{indent}{key}:", comment
        for name, item in value.items():
            yield from _lines(name, item, (*path, name), f"{indent}  ", comments)
    else:
        yield f"{indent}{key}:", comment
        for number, item in enumerate(value):
            yield from _entry(item, (*path, number), f"{indent}  ", comments)


def _entry(item: Any, path: Path, indent: str, comments: Comments) -> Iterator[tuple[str, str]]:
    if not isinstance(item, Mapping) or len(item) <= _SHORT:
        yield f"{indent}- {one_line_yaml(item)}", comments.get(path, "")
        return
    inner = [
        line for name, value in item.items() for line in _lines(name, value, (*path, name), f"{indent}  ", comments)
    ]
    for number, (text, comment) in enumerate(inner):
        yield (f"{indent}- {text[len(indent) + 2 :]}" if number == 0 else text), comment


def _is_list_of_mappings(value: Any) -> bool:
    """Whether `value` is a list of mappings. One line for each makes it easy to add another."""
    return isinstance(value, list) and any(isinstance(one, Mapping) for one in value)
