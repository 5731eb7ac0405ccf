"""Hypothesis strategies read off the schema itself, so that a new option is generated the day it is added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from gracetune.config.base import file_name
from gracetune.config.pydantic_errors import schema


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20).filter(str.strip)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10**6) | st.floats(-1e6, 1e6) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)

ODD = st.sampled_from([
    math.nan, -math.inf, 1e308, 10**400, -(10**400), 10**18, "9" * 5000, "\ud800", "a\nb: c", "\x1b[31m", "a\0b",
    "~nosuchuser/x", "x" * 300, "/" + "d/" * 3000, "2025-01-01", "${X}", "{env:X}", "[name]", "--seed", "1e999", "nan",
    "{\"a\": NaN}", "[" * 1500, nested(60), nested(40), {"\ud800": 1}, {"k" * 2000: 1}, {"": {}}, [[]], [None], [0.9],
])  # fmt: skip
"""What people and their tools do get into files, if rarely."""


def valid_values(node: Mapping[str, Any] | None = None) -> st.SearchStrategy[Any]:
    """Any value the schema allows; optional keys are sometimes left out."""
    node = schema() if node is None else node
    if "$ref" in node:
        return st.deferred(lambda: valid_values(schema()["$defs"][node["$ref"].rsplit("/", 1)[1]]))
    if "anyOf" in node:
        return st.one_of([valid_values(option) for option in node["anyOf"]])
    if "const" in node or "enum" in node:
        return st.sampled_from([node["const"]] if "const" in node else node["enum"])
    return _BY_TYPE[node["type"]](node) if "type" in node else PLAIN


def _object(node: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "properties" not in node:
        return st.dictionaries(TEXT, st.dictionaries(TEXT, PLAIN, max_size=2), max_size=2)
    required = {name: valid_values(node["properties"][name]) for name in node.get("required", [])}
    written = {name: item for name, item in node["properties"].items() if not _is_secret(item)}
    optional = {name: valid_values(item) for name, item in written.items() if name not in required}
    return st.fixed_dictionaries(required, optional=optional)


def _is_secret(node: Mapping[str, Any]) -> bool:
    """Credentials are never written, so they cannot be read back."""
    return any(option.get("writeOnly") for option in node.get("anyOf", [node]))


def _array(node: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "prefixItems" in node:
        return st.tuples(*(valid_values(item) for item in node["prefixItems"])).map(list)
    return st.lists(valid_values(node["items"]), min_size=node.get("minItems", 0), max_size=2)


def _number(node: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    low = node.get("minimum", node.get("exclusiveMinimum", -1e9))
    high = node.get("maximum", node.get("exclusiveMaximum", 1e9))
    return st.floats(low, high, exclude_min="exclusiveMinimum" in node, exclude_max="exclusiveMaximum" in node)


def _integer(node: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    return st.integers(int(node.get("minimum", -100)), int(node.get("maximum", 10**6)))


def _string(node: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if node.get("format") == "file-name":
        return TEXT.map(file_name)
    if str(node.get("pattern", "")).startswith("^"):
        return st.sampled_from(["train", "train+test", "train[:10]", "validation[5%:50%]", "a[-3:]+b"])
    return TEXT


_BY_TYPE = {
    "object": _object,
    "array": _array,
    "number": _number,
    "integer": _integer,
    "string": lambda node: _string(node),
    "boolean": lambda _node: st.booleans(),
    "null": lambda _node: st.none(),
}


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """A document with one to three places deleted, replaced or added to."""
    for _ in range(draw(st.integers(1, 3))):
        document = draw(_mutated_once(document))
    return document


@st.composite
def _mutated_once(draw: st.DrawFn, node: Any) -> Any:
    if isinstance(node, dict) and node and draw(st.integers(0, 4)) < 4:
        key = draw(st.sampled_from(sorted(node)))
        action = draw(st.sampled_from(["inside", "inside", "inside", "delete", "rename", "add"]))
        rest = {name: value for name, value in node.items() if name != key}
        if action == "inside":
            return {**node, key: draw(_mutated_once(node[key]))}
        if action == "rename":
            return {**rest, key + "x": node[key]}
        return rest if action == "delete" else {**node, draw(TEXT): draw(PLAIN)}
    if isinstance(node, list) and node and draw(st.integers(0, 4)) < 4:
        index = draw(st.integers(0, len(node) - 1))
        action = draw(st.sampled_from(["inside", "inside", "delete", "twice"]))
        if action == "inside":
            return [*node[:index], draw(_mutated_once(node[index])), *node[index + 1 :]]
        return [*node[:index], *node[index + 1 :]] if action == "delete" else [*node, node[index]]
    return draw(PLAIN | ODD)
