"""Conversion of events to JSON and back, and their JSON Schema. All of it is derived from the dataclasses in `events`.

A line of the log is `{"v": 3, "kind": "StepDone", "time_s": ..., <the event's fields>}`. JSON has no NaN and no
infinity: such a number is written as the string "NaN", "Infinity" or "-Infinity".

`python -m gracetune.telemetry.schema` prints `docs/events.md`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union

from gracetune.telemetry.events import EVENTS, PARTS, READ_VERSIONS, SCHEMA_VERSION, Record

_KINDS = {kind.__name__: kind for kind in EVENTS}
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_HEAD = ("v", "kind", "time_s")
_TOO_LARGE = 1 << 1023
"""Integers in JSON are unbounded; from 2**1024 on, `float` raises OverflowError."""


class NotAnEventError(Exception):
    """A line is not an event of a version that this release reads. The message says why."""


# -- events to JSON ---------------------------------------------------------------------------------------------------


def to_json(record: Record) -> dict[str, Any]:
    event = record.event
    fields = {one.name: plain(vars(event)[one.name]) for one in dataclasses.fields(event)}
    return {"v": SCHEMA_VERSION, "kind": type(event).__name__, "time_s": record.time_s, **fields}


def to_line(record: Record) -> bytes:
    text = json.dumps(to_json(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate (from a file name that is not UTF-8) cannot be encoded: write it as \udcXX, not lose the line.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def plain(value: Any) -> Any:
    """A value as JSON data: non-finite numbers as text, dataclasses as objects."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(vars(value)[one.name]) for one in dataclasses.fields(value)}
    return value


# -- JSON to events ---------------------------------------------------------------------------------------------------


def from_line(line: bytes) -> Record:
    """The event of a line. Raises NotAnEventError. Fields of a later release are ignored."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotAnEventError(f"no JSON: {error}") from None
    return from_json(value)


def from_json(value: Any) -> Record:
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise NotAnEventError("no event")
    if value.get("v") not in READ_VERSIONS:
        supported = ", ".join(map(str, READ_VERSIONS))
        raise NotAnEventError(f"an event of version {value.get('v')} (versions {supported} are read): update gracetune")
    kind = _KINDS.get(value["kind"])
    if kind is None:
        raise NotAnEventError(f"an event of an unknown kind, {value['kind']}")
    time_s = _float(value.get("time_s"), "time_s")
    return Record(time_s, _object(value, kind))


def _object(value: Mapping[str, Any], kind: type[Any]) -> Any:
    given = {}
    for name, read, required in _FIELDS[kind]:
        if name in value:
            given[name] = read(value[name], name)
        elif required:
            raise NotAnEventError(f"{kind.__name__} without {name}")
    return kind(**given)


_Reader = Callable[[Any, str], Any]
"""Converts a JSON value to a field's value. Its second argument is the field's name, for the error."""


def _fields(kind: type[Any]) -> tuple[tuple[str, _Reader, bool], ...]:
    """Each field of an event: its name, its reader, and whether it is required."""
    hints = typing.get_type_hints(kind)
    return tuple(
        (
            one.name,
            _reader(hints[one.name]),
            one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING,
        )
        for one in dataclasses.fields(kind)
    )


def _reader(hint: Any) -> _Reader:
    """The reader of a type. Built once per field, not per line: a log has hundreds of thousands of lines."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value, name: value
    if origin in (Union, types.UnionType):
        (wanted,) = (_reader(one) for one in inner if one is not types.NoneType)
        return lambda value, name: None if value is None else wanted(value, name)
    if origin is Literal:
        return lambda value, name: value if value in inner else _reject(value, name)
    if origin is tuple:
        one = _reader(inner[0])
        return lambda value, name: (
            tuple([one(item, name) for item in value]) if isinstance(value, list) else _reject(value, name)
        )
    if dataclasses.is_dataclass(hint):
        return lambda value, name: (
            _object(value, typing.cast("type[Any]", hint)) if isinstance(value, dict) else _reject(value, name)
        )
    if inner:
        held = _reader(inner[1])
        return lambda value, name: (
            {key: held(item, name) for key, item in value.items()} if isinstance(value, dict) else _reject(value, name)
        )
    return _SCALARS[hint]


def _float(value: Any, name: str) -> float:
    kind = type(value)
    if kind is float or (kind is int and abs(value) < _TOO_LARGE) or (kind is str and value in _NOT_FINITE):
        return float(value)
    return float(_reject(value, name))


def _int(value: Any, name: str) -> int:
    return value if type(value) is int and abs(value) < 1 << 63 else _reject(value, name)


def _str(value: Any, name: str) -> str:
    return value if type(value) is str else _reject(value, name)


def _bool(value: Any, name: str) -> bool:
    return value if type(value) is bool else _reject(value, name)


def _reject(value: Any, name: str) -> Any:
    raise NotAnEventError(f"{name} is {repr(value)[:200]}")


_SCALARS: dict[Any, _Reader] = {float: _float, int: _int, str: _str, bool: _bool}
_FIELDS = {kind: _fields(kind) for kind in (*EVENTS, *PARTS)}


# -- the schema -------------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of one line of the log."""
    return {
        "title": f"gracetune event log, version {SCHEMA_VERSION}",
        "anyOf": [_kind_schema(kind) for kind in EVENTS],
    }


def _kind_schema(kind: type[Any]) -> dict[str, Any]:
    head = {"v": {"const": SCHEMA_VERSION}, "kind": {"const": kind.__name__}, "time_s": {"type": "number"}}
    body = _object_schema(kind)
    return {
        **body,
        "title": kind.__name__,
        "properties": {**head, **body["properties"]},
        "required": [*_HEAD, *body["required"]],
    }


def _object_schema(kind: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [one.name for one in dataclasses.fields(kind)]
    return {"type": "object", "properties": {name: _schema(hints[name]) for name in names}, "required": names}


def _schema(hint: Any) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return {**_schema(inner[0]), "description": inner[1]}
    if origin in (Union, types.UnionType):
        (wanted,) = (one for one in inner if one is not types.NoneType)
        return {"anyOf": [_schema(wanted), {"type": "null"}]}
    if origin is Literal:
        return {"enum": [*inner]}
    if origin is tuple:
        return {"type": "array", "items": _schema(inner[0])}
    if origin is not None:
        return {"type": "object", "additionalProperties": _schema(inner[1])}
    if dataclasses.is_dataclass(hint):
        return _object_schema(typing.cast("type[Any]", hint))
    if hint is float:
        return {"anyOf": [{"type": "number"}, {"enum": [*_NOT_FINITE]}]}
    return {} if hint is Any else {"type": {int: "integer", str: "string", bool: "boolean"}[hint]}


def document() -> str:
    """The text of docs/events.md."""
    parts = [_INTRODUCTION.format(version=SCHEMA_VERSION)]
    parts += [_table(kind) for kind in (*EVENTS, *PARTS)]
    schema = json.dumps(json_schema(), indent=1, ensure_ascii=False)
    parts.append(
        f"## JSON Schema\n\nThe schema of one line. Every field is always written.\n\n```json\n{schema}\n```\n"
    )
    return "\n".join(parts)


def _table(kind: type[Any]) -> str:
    hints = typing.get_type_hints(kind, include_extras=True)
    rows = []
    for one in dataclasses.fields(kind):
        wanted, note = typing.get_args(hints[one.name])[:2]
        rows.append(f"| `{one.name}` | {_type_name(wanted)} | {note.replace('|', chr(92) + '|')} |")
    about = " ".join((inspect.getdoc(kind) or "").split())
    return f"## {kind.__name__}\n\n{about}\n\n| field | type | |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _type_name(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if one is types.NoneType else _type_name(one) for one in inner)
    if origin is Literal:
        return ", ".join(f'"{one}"' for one in inner)
    if origin is tuple:
        return f"list of {_type_name(inner[0])}"
    if origin is not None:
        return f"string -> {_type_name(inner[1])}"
    if hint is Any:
        return "any"
    names: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}
    return names.get(hint) or str(hint.__name__)


_INTRODUCTION = """# The event log

Generated by `python -m gracetune.telemetry.schema`; a test compares this page with its output. Version {version}.

`logs/events.jsonl` in a run's folder holds one JSON object per line, in UTF-8, appended as events happen. Every line
has `v` (the version of this schema), `kind` (a heading below) and `time_s` (seconds since 1970, UTC), then the fields
of the event.

- Non-finite numbers, which JSON cannot represent, are written as the strings "NaN", "Infinity" and "-Infinity".
- A process that is killed may leave an incomplete last line; the next process begins a new line. Readers skip
  incomplete lines.
- While the log cannot be written (a full disk, for example), events are kept in memory, at most 32 MiB; they are
  written in order once it can be.
- A resumed run appends to the log, beginning with a `RunStarted`. It repeats the steps after its `resumed_step`: events
  that earlier processes wrote for these steps are void. If `resumed_step` is null, all earlier events are void.
- New fields may appear within a version; readers ignore fields they do not know. Any other change raises the version.
- Version 2 adds `EffectiveBatchChanged`, `OverflowArenaChanged`, `MemoryReclaimed`, `LookAheadChanged` and
  `SelfChecked` to version 1; version 3 adds `Planned` and `RequestServed`. Nothing else changed. The run's report reads
  all versions, even mixed in one log.
- Secrets of the configuration and of the environment are written as `(hidden)` (docs/configuration.md, "Secrets").
- With several processes, memory events describe the first process.
"""


if __name__ == "__main__":
    sys.stdout.write(document())
