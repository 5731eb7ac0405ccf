"""Converts pydantic's errors to ours: the user's own key, the value found, what is expected, and what to type.

What is expected, and the suggestion, are derived from the JSON Schema of `RunConfig`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic_core import ErrorDetails

from gracetune.config.base import LONGEST_FILE_NAME, file_name
from gracetune.config.draft import Draft, Path, describe, dotted, problem_with
from gracetune.config.limits import MOST_PROBLEMS
from gracetune.config.run_config import RunConfig
from gracetune.config.spelling import misspelt, nearest
from gracetune.config.yaml_syntax import one_line_yaml
from gracetune.errors import Problem


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of `RunConfig`. It is shared, so callers must not change it."""
    return RunConfig.model_json_schema()


def problems_of(errors: Iterable[ErrorDetails], draft: Draft) -> list[Problem]:
    """Return one problem per path, even if several members of a union reported an error there."""
    by_path: dict[Path, ErrorDetails] = {}
    for error in errors:
        if len(by_path) > MOST_PROBLEMS:
            break
        path = known_path(error["loc"], error["type"])
        if not (error["type"] == "missing" and path in draft.reported_missing):
            by_path.setdefault(path, error)
    return [_problem(path, error, draft) for path, error in by_path.items()]


def known_path(loc: tuple[int | str, ...], error_type: str) -> Path:
    """Return the part of pydantic's location that names a field. For a union, pydantic appends the member it tried."""
    if error_type == "extra_forbidden":
        return loc
    path: Path = ()
    for step in loc:
        if schema_at((*path, step)) is None:
            break
        path = (*path, step)
    # A missing item of a list means that the list is too short, so the list is reported.
    return path[:-1] if error_type == "missing" and path and isinstance(path[-1], int) else path


def _problem(path: Path, error: ErrorDetails, draft: Draft) -> Problem:
    key, file = draft.written_key(path)
    if error["type"] == "extra_forbidden":
        return _unknown_key(path, key, error["input"], draft)
    expected = expectation(path)
    if error["type"] == "missing" and draft.get(path) is None:
        return Problem(key, "nothing", expected, _addition(path, draft.get(path[:-1])), file)
    found = draft.get(path) if error["type"] == "missing" else error["input"]
    origin = draft.origin(path)
    by_flag = origin is not None and origin.kind == "flag"
    return problem_with(key, found, expected, suggestion(path, found, key, by_flag=by_flag), file)


def _addition(path: Path, beside: Any) -> str:
    """Return what to add for a required key that is missing. `beside` is the section that lacks it."""
    node = schema_at(path)
    example = _example([node, *_options(node)]) if node is not None else None
    if example is None or not isinstance(path[-1], str):
        return f"add `{dotted(path)}`"
    section = f"to `{dotted(path[:-1])}`" if path[:-1] else ""
    named = _named_beside(beside, _choices(node))
    if named is not None:
        return f"add `{path[-1]}: {named}` {section}".strip()
    return f"add `{path[-1]}: {example}`, for example" + (f", {section}" if section else "")


def _named_beside(section: Any, names: Iterable[str]) -> str | None:
    """The first of `names` that a text of the section contains, such as the family in `path: ./sdxl`."""
    values = section.values() if isinstance(section, Mapping) else ()
    texts = [value.lower().replace("-", "_") for value in values if isinstance(value, str)]
    return next((name for name in names if any(name in text for text in texts)), None)


def _is_secret(path: Path) -> bool:
    node = schema_at(path)
    return node is not None and any(option.get("writeOnly") for option in _options(node))


def _unknown_key(path: Path, key: str, value: Any, draft: Draft) -> Problem:
    names = field_names(path[:-1])
    ours = _peers_name(path, draft)
    if ours is not None:
        hint = f"write `--set {dotted(ours)}=…`, which is our name for it"
    else:
        hint = misspelt(str(path[-1]), names, f"remove it; known here: {', '.join(names)}" if names else "remove it")
    file = draft.written_key(path)[1]
    return problem_with(key, value, "a key of the configuration", hint, file, sentence="an unknown key (value {})")


def _peers_name(path: Path, draft: Draft) -> Path | None:
    """Return our path of a key that a flag spells as the peer's file does, or None."""
    given = draft.origin(path)
    if given is None or given.kind != "flag":
        return None
    typed = dotted(path)
    for ours, origin in draft.origins.items():
        if origin.kind != "flag" and (origin.key == typed or origin.key.endswith((f".{typed}", f"--{typed}"))):
            return ours
    return None


def schema_at(path: Path) -> Mapping[str, Any] | None:
    """Return the schema of the field at a path, or None if there is no such field."""
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
    """Resolve references and unions: return every schema that the value can match."""
    if "$ref" in node:
        return _options(schema()["$defs"][node["$ref"].rsplit("/", 1)[1]])
    if "anyOf" in node:
        return [option for member in node["anyOf"] for option in _options(member)]
    return [node]


def _step_into(node: Mapping[str, Any], step: str | int) -> Mapping[str, Any] | None:
    if isinstance(step, str):
        found = node.get("properties", {}).get(step, node.get("additionalProperties"))
        return found if isinstance(found, Mapping) else None
    fixed = node.get("prefixItems", [])
    found = fixed[step] if step < len(fixed) else node.get("items")
    return found if isinstance(found, Mapping) else None


def expectation(path: Path) -> str:
    """Describe the values that are allowed at a path, such as `a whole number >= 1`."""
    node = schema_at(path)
    if node is None:
        return "a value"
    texts = [text for option in _options(node) if (text := _in_words(option))]
    return " or ".join(dict.fromkeys(texts)) or "a value"


def accepted(path: Path) -> list[Mapping[str, Any]]:
    """The schema of every kind of value that is allowed at a path; null is left out."""
    node = schema_at(path)
    return [option for option in _options(node) if option.get("type") != "null"] if node is not None else []


def choices(path: Path) -> list[Any]:
    """The values to choose from at a path; empty if others are allowed too."""
    options = accepted(path)
    return [value for option in options for value in _allowed(option)] if all(map(_allowed, options)) else []


def _choices(node: Mapping[str, Any] | None) -> list[str]:
    options = _options(node) if node is not None else []
    return [str(choice) for option in options for choice in _allowed(option)]


def _allowed(option: Mapping[str, Any]) -> list[Any]:
    return [option["const"]] if "const" in option else list(option.get("enum", []))


def _in_words(option: Mapping[str, Any]) -> str:
    if choices := _allowed(option):
        return ("one of " if len(choices) > 1 else "") + ", ".join(str(choice) for choice in choices)
    if option.get("format") == "file-name":
        return f"a file name: no folder, no / or \\, at most {LONGEST_FILE_NAME} bytes"
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
    limits = [f"{sign} {_digits(option[name])}" for name, sign in signs.items() if name in option]
    if option.get("minLength"):
        limits.append("that is not empty")
    if "minItems" in option and option.get("minItems") == option.get("maxItems"):
        limits.append(f"of {option['minItems']}")
    return " and ".join(limits)


def _digits(limit: float) -> str:
    return f"{limit:,.0f}" if limit >= 10_000 else f"{limit:g}"


_NUMBER = re.compile(
    r"\s*([-+]?(?:\d{1,3}(?:[,_]\d{3})+(?![\d,_])|\d+)?(?:\.\d*)?(?<=[\d.])(?:[eE][-+]?\d+)?)\s*(?:[A-Za-z]{2,}\s*)?"
)
"""A number, perhaps with separators between thousands, and with a unit of two letters or more. One letter may mean a
factor, as in `10k`."""
_TRUE, _FALSE = ("1", "true", "yes", "y", "on"), ("0", "false", "no", "n", "off")


def suggestion(path: Path, found: Any, key: str, *, by_flag: bool = False) -> str:
    """Return what to type instead of an invalid value. If a flag set it (`by_flag`), `key` begins with `--set`."""
    node = schema_at(path)
    options = _options(node) if node is not None else []
    near = nearest(found, _choices(node)) if isinstance(found, str) else None
    if near:
        return _typed(near, key, by_flag)
    types = [str(option.get("type", "")) for option in options]
    meant = next((text for kind in types if (text := _meant(kind, found, options)) is not None), None)
    if meant is not None and not _other_unit(path, found):
        return _typed(meant, key, by_flag)
    section = _section_meant(found, options)
    if section is not None:
        name = key.rpartition(".")[2]
        return _typed(section if by_flag or name.endswith("]") else f"{name}: {section}", key, by_flag)
    usual = node.get("default") if node is not None else None
    # For a number that is out of range, the default is the most useful example.
    numeric = isinstance(usual, int | float) and not isinstance(usual, bool) and usual != 0
    example = f"{usual:g}" if numeric else _example(options)
    if example is None:
        return f"remove `{key}`"
    return f"{_typed(example, key, True)}, for example" if by_flag else f"give `{key}` {example}, for example"


def _section_meant(found: Any, options: list[Mapping[str, Any]]) -> str | None:
    """Expand a single value to the section it was meant for: `model: ./sdxl`, `training: 500`. None if unclear."""
    section = next((option for option in options if option.get("properties")), None)
    if section is None or isinstance(found, bool) or not isinstance(found, str | int | float):
        return None
    fields, required = section["properties"], section.get("required", [])
    if not isinstance(found, str):
        return next((f"{{{name}: {number}}}" for name in _USUAL_NUMBERS if name in fields
                     and (number := _one_meant(found, _options(fields[name]))) is not None), None)  # fmt: skip
    for name, field in fields.items():
        if found.lower() in _choices(field):
            return f"{{{name}: {found.lower()}}}"
        if found.lower() in _choices(_item(field)):
            return f"{{{name}: [{found.lower()}]}}"
    prompts = _item(fields.get("prompts", {}))
    if prompts is not None:
        return one_line_yaml({"prompts": [{_options(prompts)[0]["required"][0]: found}]})
    texts = [
        name for name, field in fields.items()
        if any(one.get("type") == "string" and not _allowed(one) for one in _options(field))
    ]  # fmt: skip
    if not texts:
        return None
    name = "path" if "path" in texts else next((one for one in required if one in texts), texts[0])
    choices = {one: _choices(fields[one]) for one in required if one != name}
    filled = {one: _named_in(found, known) for one, known in choices.items() if known}
    return one_line_yaml({**filled, name: found})


_USUAL_NUMBERS = ("max_steps", "every_steps", "rank", "lr")
"""What a number stands for that is written instead of a section, such as `training: 500`."""


def _one_meant(found: Any, options: list[Mapping[str, Any]]) -> str | None:
    kinds = [str(option.get("type", "")) for option in options]
    return next((text for kind in kinds if (text := _meant(kind, found, options)) is not None), None)


def _item(field: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of a list's items."""
    return next((option["items"] for option in _options(field) if isinstance(option.get("items"), Mapping)), None)


def _named_in(text: str, choices: list[str]) -> str:
    """Return the choice whose name is part of a path, such as a family's name; else the first choice."""
    return next((one for one in choices if one in text.lower()), choices[0])


def _other_unit(path: Path, found: Any) -> bool:
    """Whether a value such as `512MB` is in another unit than its key, which is in GB. Its number would be wrong."""
    unit = re.sub(r"[^a-z]", "", found.lower()) if isinstance(found, str) else ""
    return bool(path) and str(path[-1]).endswith("_gb") and unit[:1] in ("b", "k", "m", "t")


def _typed(text: str, key: str, by_flag: bool) -> str:
    return f"write `{key}={shlex.quote(text)}`" if by_flag else f"write `{text}`"


def _meant(kind: str, found: Any, options: list[Mapping[str, Any]]) -> str | None:
    """Convert a value of the wrong type to the one that was probably meant; None if that would be a guess."""
    if kind in ("integer", "number"):
        number = _number(found)
        if number is None or (kind == "integer" and not number.is_integer()) or not _within(number, options):
            return None
        return f"{int(number)}" if number.is_integer() else f"{number:.15g}"
    if kind == "string" and isinstance(found, bool | int | float):
        return f'"{describe(found)}"'
    if kind == "string" and isinstance(found, str) and options[0].get("format") == "file-name":
        return file_name(found) or "my-run"
    if kind == "boolean":
        word = str(found).strip().lower()
        return "true" if word in _TRUE else "false" if word in _FALSE else None
    return _list_meant(found, options) if kind == "array" and isinstance(found, str | int | float) else None


def _list_meant(found: Any, options: list[Mapping[str, Any]]) -> str | None:
    """The list whose only item was written without brackets, or whose items have commas between them. None if such an
    item is not allowed, or if the list has a fixed length and these are not as many."""
    fixed = next((option["prefixItems"] for option in options if "prefixItems" in option), None)
    if fixed is not None:
        given = found.split(",") if isinstance(found, str) else [found]
        each = [
            _one_meant(one.strip(), [item]) for one, item in zip(given, fixed, strict=False) if isinstance(one, str)
        ]
        return None if None in each or not len(each) == len(given) == len(fixed) else f"[{', '.join(map(str, each))}]"
    items = next((_options(option["items"]) for option in options if isinstance(option.get("items"), Mapping)), [])
    if not isinstance(found, str):
        only = _one_meant(found, items)
        return None if only is None else f"[{only}]"
    allowed = _choices({"anyOf": items})
    parts = [part for one in found.split(",") if (part := one.strip())]
    if allowed and parts:
        near = [part if part in allowed else nearest(part, allowed) for part in parts]
        return None if None in near else one_line_yaml(near)
    if any(one.get("type") == "string" for one in items):
        return one_line_yaml([found] if set("()[]{}") & set(found) else parts) if parts else None
    section = _section_meant(found, items)
    meant = [_one_meant(part, items) for part in parts] if section is None else [section]
    return None if None in meant or not meant else f"[{', '.join(map(str, meant))}]"


def _number(found: Any) -> float | None:
    """Return the number that a value is (`8.0`, `"1,000"`) or has before a unit (`"200GB"`), or None."""
    if isinstance(found, bool) or not isinstance(found, str | int | float):
        return None
    match = _NUMBER.fullmatch(str(found))
    digits = re.sub("[,_]", "", match[1]) if match else ""
    number = float(digits) if re.search(r"\d", digits) else math.inf
    return number if abs(number) < 1e15 else None


def _within(number: float, options: list[Mapping[str, Any]]) -> bool:
    return any(
        option.get("minimum", -math.inf) <= number <= option.get("maximum", math.inf)
        and option.get("exclusiveMinimum", -math.inf) < number < option.get("exclusiveMaximum", math.inf)
        for option in options
        if option.get("type") in ("integer", "number")
    )


def _example(options: list[Mapping[str, Any]]) -> str | None:
    """Return an example of an allowed value, if the value found gives no clue."""
    for option in options:
        if option.get("examples"):
            return str(option["examples"][0])
        if choices := _allowed(option):
            return str(choices[0])
        if "prefixItems" in option:
            return f"[{', '.join(_some_number(item) for item in option['prefixItems'])}]"
        kind = str(option.get("type", ""))
        if kind in ("integer", "number"):
            return _some_number(option)
        if option.get("properties"):
            return _section_example(option)
        if kind in _EXAMPLES:
            return _EXAMPLES[kind]
    return None


def _section_example(option: Mapping[str, Any]) -> str:
    """Return an example of a section with its required values, or with its first one, so that it is never empty."""
    fields = option["properties"]
    names = option.get("required") or [*fields][:1]
    values = {name: _example(_options(fields[name])) for name in names}
    return f"{{{', '.join(f'{name}: {value}' for name, value in values.items() if value is not None)}}}"


_EXAMPLES = {"string": '"some text"', "boolean": "true", "array": "[]", "object": "{}"}


def _some_number(option: Mapping[str, Any]) -> str:
    low = option.get("minimum", option.get("exclusiveMinimum", 0))
    high = option.get("maximum", option.get("exclusiveMaximum"))
    if high is not None and high <= 1000:
        return f"{(low + high) / 2:g}"
    return f"{max(low, 0) + ('exclusiveMinimum' in option):g}"
