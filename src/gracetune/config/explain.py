"""Turns pydantic's errors into ours: the user's own key, what stood there, what may stand there, what to type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic_core import ErrorDetails

from gracetune.config.draft import Draft, Path, describe, dotted
from gracetune.config.run_config import RunConfig
from gracetune.config.spelling import nearest
from gracetune.errors import Problem


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of a `RunConfig`; read only."""
    return RunConfig.model_json_schema()


def problems_of(errors: Iterable[ErrorDetails], draft: Draft) -> list[Problem]:
    """One problem a place, however many members of a union complained about it."""
    by_path: dict[Path, ErrorDetails] = {}
    for error in errors:
        path = known_path(error["loc"], error["type"])
        if not (error["type"] == "missing" and path in draft.reported_missing):
            by_path.setdefault(path, error)
    return [_problem(path, error, draft) for path, error in by_path.items()]


def known_path(loc: tuple[int | str, ...], error_type: str) -> Path:
    """The part of pydantic's location that names a field; unions append the name of the member they tried."""
    if error_type == "extra_forbidden":
        return loc
    path: Path = ()
    for step in loc:
        if schema_at((*path, step)) is None:
            break
        path = (*path, step)
    return path


def _problem(path: Path, error: ErrorDetails, draft: Draft) -> Problem:
    key, file = draft.place(path)
    if error["type"] == "extra_forbidden":
        return _unknown_key(path, key, error["input"], file)
    expected = expectation(path)
    if error["type"] == "missing":
        return Problem(key, "nothing", expected, f"add `{dotted(path)}`", file)
    return Problem(key, describe(error["input"]), expected, _hint(path, key, error["input"]), file)


def _unknown_key(path: Path, key: str, value: Any, file: str | None) -> Problem:
    names = field_names(path[:-1])
    near = nearest(str(path[-1]), names)
    hint = f"write `{near}`" if near else f"remove it; known here: {', '.join(names)}"
    return Problem(key, f"an unknown key (value {describe(value)})", "a key of the configuration", hint, file)


def _hint(path: Path, key: str, found: Any) -> str:
    choices = _choices(schema_at(path))
    near = nearest(found, choices) if isinstance(found, str) else None
    if near:
        return f"write `{near}`"
    return f"give `{key}` {expectation(path)}"


def schema_at(path: Path) -> Mapping[str, Any] | None:
    """The schema of the field at a path, or None where the path leaves the known fields."""
    node: Mapping[str, Any] = schema()
    for step in path:
        following = [found for option in _options(node) if (found := _step_into(option, step)) is not None]
        if not following:
            return None
        node = following[0]
    return node


def field_names(path: Path) -> list[str]:
    node = schema_at(path)
    return sorted({name for option in _options(node) for name in option.get("properties", {})}) if node else []


def required_names(path: Path) -> list[str]:
    node = schema_at(path)
    return [name for option in _options(node) for name in option.get("required", [])] if node else []


def _options(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A node with references and unions unfolded."""
    if "$ref" in node:
        return _options(schema()["$defs"][node["$ref"].rsplit("/", 1)[1]])
    if "anyOf" in node:
        return [option for member in node["anyOf"] for option in _options(member)]
    return [node]


def _step_into(node: Mapping[str, Any], step: str | int) -> Mapping[str, Any] | None:
    if isinstance(step, str):
        found = node.get("properties", {}).get(step)
        return found if isinstance(found, Mapping) else None
    fixed = node.get("prefixItems", [])
    found = fixed[step] if step < len(fixed) else node.get("items")
    return found if isinstance(found, Mapping) else None


def expectation(path: Path) -> str:
    """What may stand at a path, in words."""
    node = schema_at(path)
    if node is None:
        return "a value"
    texts = [text for option in _options(node) if (text := _in_words(option))]
    return " or ".join(dict.fromkeys(texts)) or "a value"


def _choices(node: Mapping[str, Any] | None) -> list[str]:
    options = _options(node) if node is not None else []
    return [str(choice) for option in options for choice in _allowed(option)]


def _allowed(option: Mapping[str, Any]) -> list[Any]:
    return [option["const"]] if "const" in option else list(option.get("enum", []))


def _in_words(option: Mapping[str, Any]) -> str:
    if choices := _allowed(option):
        return ("one of " if len(choices) > 1 else "") + ", ".join(str(choice) for choice in choices)
    nouns = {
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "boolean": "true or false",
        "array": "a list",
        "object": "a mapping",
    }
    noun = nouns.get(str(option.get("type", "")), "")
    return f"{noun} {_bounds(option)}".strip() if noun else ""


def _bounds(option: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {option[name]:g}" for name, sign in signs.items() if name in option]
    if option.get("minLength"):
        limits.append("that is not empty")
    if "minItems" in option and option.get("minItems") == option.get("maxItems"):
        limits.append(f"of {option['minItems']}")
    return " and ".join(limits)
