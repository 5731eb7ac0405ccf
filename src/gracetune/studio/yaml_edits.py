"""Changes single values in the text of a config of our own dialect. Comments and layout stay where possible.

The position of a value comes from the YAML parser. Every change is checked by parsing the new text: where the text
cannot be changed in place (short forms, aliases, new list entries), it is written anew, without its comments.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import yaml

from gracetune.config import native
from gracetune.config.draft import Path
from gracetune.config.limits import NotPlainError
from gracetune.config.plain_data import plain
from gracetune.config.yaml_syntax import UNREADABLE, compose_yaml, one_line_yaml, parse_yaml


def sections_of(text: str) -> dict[str, Any] | None:
    """The sections of a text of our own dialect, in their long form; None if it is something else or malformed."""
    try:
        data, _ = plain(parse_yaml(text))
    except (*UNREADABLE, NotPlainError):
        return None
    if not native.looks_like(data):
        return None
    return dict(_long_form(key, value) for key, value in data.items())


def _long_form(key: str, value: Any) -> tuple[str, Any]:
    path, value = native.written_out((key,), value)
    for part in reversed(path[1:]):
        value = {part: value}
    return key, value


def with_values(text: str, changes: Mapping[Path, Any]) -> str | None:
    """The text with each value at its path; None removes the key. Returns None if the text cannot be parsed."""
    for path, value in changes.items():
        before = sections_of(text)
        if before is None:
            return None
        wanted = _with_value(before, path, value)
        if _is_same(wanted, before):
            continue
        edited = _in_place(text, path, value)
        text = edited if edited is not None and _is_same(sections_of(edited), wanted) else _written_anew(wanted)
    return text


def _is_same(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether the values and their types are equal. To Python 2 equals 2.0, but a config may allow only one of them."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _written_anew(sections: Mapping[str, Any]) -> str:
    return native.write_values({key: value for key, value in sections.items() if key != native.VERSION_KEY})


def _with_value(sections: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """A copy with the value at its path. Parts of the path that are no sections or lists are replaced by some."""
    root: dict[str, Any] = copy.deepcopy(dict(sections))
    node: Any = root
    for step, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(step, int):
            if step >= len(node):
                if value is None:
                    return root
                step = len(node)  # the next free place, whatever the number
                node.append(None)
        elif step not in node:
            if value is None:
                return root
            node[step] = None
        if following is None:
            break
        kind = list if isinstance(following, int) else dict
        if not isinstance(node[step], kind):
            if value is None:
                return root
            node[step] = kind()
        node = node[step]
    if value is None:
        del node[step]
    else:
        node[step] = value
    return root


def _in_place(text: str, path: Path, value: Any) -> str | None:
    node = compose_yaml(text)
    for depth, step in enumerate(path):
        found = _child(node, step)
        if found is None:
            return None if value is None else _inserted(text, node, path[depth:], value)
        key, node, around = *found, node
        if depth == len(path) - 1:
            return _removed(text, around, key, node) if value is None else _replaced(text, node, value)
    return None


def _child(node: yaml.Node | None, step: str | int) -> tuple[yaml.Node | None, yaml.Node] | None:
    """The key and the value of an entry. List entries have no key."""
    if isinstance(node, yaml.MappingNode) and isinstance(step, str):
        return next(((key, inner) for key, inner in node.value if key.value == step), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return None, node.value[step]
    return None


def _replaced(text: str, node: yaml.Node, value: Any) -> str:
    begin, end = node.start_mark.index, node.end_mark.index
    end -= len(text[begin:end]) - len(text[begin:end].rstrip())
    space = " " if text[:begin].endswith(":") else ""
    return f"{text[:begin]}{space}{one_line_yaml(value)}{text[end:]}"


def _removed(text: str, around: yaml.Node, key: yaml.Node | None, node: yaml.Node) -> str | None:
    if key is None or not isinstance(around, yaml.MappingNode) or around.flow_style:
        return None
    begin, end = text.rfind("\n", 0, key.start_mark.index) + 1, _end_of_line(text, node)
    if text[begin : key.start_mark.index].strip():  # `- key: value`
        return None
    return text[:begin] + text[end + 1 :]


def _inserted(text: str, node: yaml.Node | None, path: Path, value: Any) -> str | None:
    """Add a key to the mapping that is there. `path` begins with the missing key."""
    for step in reversed(path[1:]):
        value = [value] if isinstance(step, int) else {step: value}
    if not isinstance(node, yaml.MappingNode) or not isinstance(path[0], str) or not node.value:
        return None
    entry = f"{one_line_yaml(path[0])}: {one_line_yaml(value)}"
    if node.flow_style:
        end = node.end_mark.index - 1
        inside = text[:end].rstrip()
        comma = "" if inside.endswith((",", "{")) else ","
        return f"{inside}{comma} {entry}{text[end:]}"
    end = _end_of_line(text, node)
    return f"{text[:end]}\n{' ' * node.start_mark.column}{entry}{text[end:]}"


def _end_of_line(text: str, node: yaml.Node) -> int:
    """The end of the line on which a value ends. The parser puts the end of a block after the blank lines below it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(node, yaml.MappingNode) else last
    end = node.end_mark.index
    while end and text[end - 1 : end] == "\n":
        end -= 1
    found = text.find("\n", end)
    return len(text) if found < 0 else found
