"""Reads YAML as people expect it: `1e-4` is a number, `2025-01-01` and `16:9` are text, a duplicate key is an error.

It uses PyYAML's parser in Python, because the one in C crashes the process at deep nesting. That parser is slow, and
merge keys and aliases can expand a small file without limit, so nodes are counted while it reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from gracetune.config.limits import MOST_VALUES, NotPlainError, too_deep, too_many_values

_MERGE, _VALUE = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"
_DATE, _INT, _FLOAT = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_TEXT = "tag:yaml.org,2002:str"

UNREADABLE = (yaml.YAMLError, LookupError, ValueError, TypeError, OverflowError)
"""Every exception that PyYAML raises. KeyError and IndexError: `!!bool maybe`, `!!int ""`; ValueError: `!!int x`;
TypeError: a list as a key; OverflowError: a number too large for a float."""


class DuplicateKeyError(ValueError):
    def __init__(self, key: str, line: int = 0) -> None:
        super().__init__(key)
        self.key, self.line = key, line


class _Loader(yaml.SafeLoader):
    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._nodes = 0
        self._merged = 0
        self._checked: set[int] = set()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        if self._nodes > 2 * MOST_VALUES:  # keys are nodes too
            raise too_many_values("check that this is the right file")
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Insert the pairs of `<<` before the mapping's own pairs, which then override them.

        PyYAML calls this for each mapping, and again for one that others merge. Duplicates are looked for only the
        first time, before merged pairs repeat keys.
        """
        if id(node) not in self._checked:
            self._checked.add(id(node))
            _reject_duplicates(node)
        merges = [value for key, value in node.value if key.tag == _MERGE]
        node.value = [pair for pair in node.value if pair[0].tag != _MERGE]
        for key, _ in node.value:
            if key.tag == _VALUE:
                key.tag = _TEXT
        merged = [pair for value in merges for one in self._merged_mappings(value) for pair in self._pairs(one)]
        if merged:
            node.value = merged + node.value

    def _merged_mappings(self, value: yaml.Node) -> Iterator[yaml.MappingNode]:
        """Yield the mappings to merge in reverse order: in YAML the first one wins, and here later pairs override."""
        nodes: list[yaml.Node] = value.value[::-1] if isinstance(value, yaml.SequenceNode) else [value]
        for one in nodes:
            if not isinstance(one, yaml.MappingNode):
                problem = "expected a mapping, or a list of mappings, to merge"
                raise yaml.constructor.ConstructorError(None, None, problem, one.start_mark)
            yield one

    def _pairs(self, node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
        self.flatten_mapping(node)
        self._merged += len(node.value)
        if self._merged > MOST_VALUES:  # each level of merges can double the number of pairs
            raise NotPlainError(f"more than {MOST_VALUES:,} keys", "fewer", "write out what the merges repeat")
        return list(node.value)


def _reject_duplicates(node: yaml.MappingNode) -> None:
    seen: set[tuple[str, str]] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
            continue
        if (key.tag, key.value) in seen:
            raise DuplicateKeyError(key.value, key.start_mark.line + 1)
        seen.add((key.tag, key.value))


def _as_text(loader: _Loader, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(None, None, "expected a date", node.start_mark)
    return str(loader.construct_scalar(node))


def _as_number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """Reject the base-60 numbers of YAML 1.1 (`!!int 16:9`), which are never intended."""
    if isinstance(node.value, str) and ":" in node.value:
        raise yaml.constructor.ConstructorError(None, None, "expected a number", node.start_mark)
    whole = node.tag == _INT
    return loader.construct_yaml_int(node) if whole else loader.construct_yaml_float(node)


class _Dumper(yaml.SafeDumper):
    """Writes values that `_Loader` reads back unchanged, each on one line."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        # Line breaks (for YAML, U+0085 is one) and other invisible characters are written as escapes.
        style = None if text.isprintable() else '"'
        return self.represent_scalar(_TEXT, text, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
_Loader.add_constructor(_DATE, _as_text)
_Loader.add_constructor(_INT, _as_number)
_Loader.add_constructor(_FLOAT, _as_number)
_NUMBERS = {
    _INT: r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][\d_]*)$",
    _FLOAT: r"[-+]?(?:(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(?:inf|Inf|INF))$"
    r"|\.(?:nan|NaN|NAN)$",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(_tag, re.compile(_pattern, re.ASCII), list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """Parse a text with one document. Raises one of `UNREADABLE`, or NotPlainError beyond the limits."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise too_deep() from None


def compose_yaml(text: str) -> yaml.Node | None:
    """The nodes of a text, with their positions. Raises like `parse_yaml`."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    except RecursionError:
        raise too_deep() from None
    return node


def parse_scalar(text: str) -> Any:
    """Parse a value from the command line as YAML: `4`, `1e-4`, `true`, `[a, b]`. Invalid YAML is text."""
    try:
        return parse_yaml(text)
    except NotPlainError:
        raise
    except UNREADABLE:
        return text


def one_line_yaml(value: Any) -> str:
    """Write a value as one line of YAML, from which it can be read back."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=2**31, sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").rstrip("\n")
