"""Events as JSON and back, and the written schema: all of it follows from the dataclasses in `events`.

A line of the log is `{"v": 2, "kind": "StepDone", "time_s": ..., <the event's fields>}`. JSON has no NaN and no
infinity: such a number is written as the text "NaN", "Infinity" or "-Infinity".

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

from gracetune.telemetry.events import EVENTS, READ_VERSIONS, SCHEMA_VERSION, Record, SampleFile

_KINDS = {kind.__name__: kind for kind in EVENTS}
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_HEAD = ("v", "kind", "time_s")
_TOO_LARGE = 1 << 1023
"""Whole numbers of JSON have no end; those of a float do."""


class NotAnEventError(Exception):
    """A line that is no event of this version, and why."""


# -- events to JSON ---------------------------------------------------------------------------------------------------


def to_json(record: Record) -> dict[str, Any]:
    event = record.event
    fields = {one.name: plain(vars(event)[one.name]) for one in dataclasses.fields(event)}
    return {"v": SCHEMA_VERSION, "kind": type(event).__name__, "time_s": record.time_s, **fields}


def to_line(record: Record) -> bytes:
    text = json.dumps(to_json(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate, as in a file name that is no UTF-8, must not cost the line.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def plain(value: Any) -> Any:
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
    """NotAnEventError where it is none. Unknown fields, of a later release, are passed over."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotAnEventError(f"no JSON: {error}") from None
    return from_json(value)


def from_json(value: Any) -> Record:
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise NotAnEventError("no event")
    if value.get("v") not in READ_VERSIONS:
        supported = " and ".join(map(str, READ_VERSIONS))
        raise NotAnEventError(f"an event of version {value.get('v')}; this release reads versions {supported}")
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
"""Makes a field's value of what JSON says; its name is for the error."""


def _fields(kind: type[Any]) -> tuple[tuple[str, _Reader, bool], ...]:
    """Name, reader, and whether it has to be there."""
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
    """Of a type. Made once for each field: a log has hundreds of thousands of lines."""
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
_FIELDS = {kind: _fields(kind) for kind in (*EVENTS, SampleFile)}


# -- the schema -------------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of one line of the log."""
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
    parts += [_table(kind) for kind in (*EVENTS, SampleFile)]
    schema = json.dumps(json_schema(), indent=1, ensure_ascii=False)
    parts.append(f"## JSON Schema\n\nOf one line; every field is always written.\n\n```json\n{schema}\n```\n")
    return "\n".join(parts)


def _table(kind: type[Any]) -> str:
    hints = typing.get_type_hints(kind, include_extras=True)
    rows = []
    for one in dataclasses.fields(kind):
        wanted, note = typing.get_args(hints[one.name])[:2]
        rows.append(f"| `{one.name}` | {_word(wanted)} | {note.replace('|', chr(92) + '|')} |")
    about = " ".join((inspect.getdoc(kind) or "").split())
    return f"## {kind.__name__}\n\n{about}\n\n| field | type | |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _word(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if one is types.NoneType else _word(one) for one in inner)
    if origin is Literal:
        return ", ".join(f'"{one}"' for one in inner)
    if origin is tuple:
        return f"list of {_word(inner[0])}"
    if origin is not None:
        return f"text -> {_word(inner[1])}"
    if hint is Any:
        return "anything"
    words: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return words.get(hint) or str(hint.__name__)


_INTRODUCTION = """# The event log

Made by `python -m gracetune.telemetry.schema`; a test compares it. Version {version}.

`logs/events.jsonl` in a run's folder holds one JSON object a line, UTF-8, appended as it happens. Every line has `v`
(the version of this schema), `kind` (a heading below) and `time_s` (seconds since 1970, UTC), then the event's fields.

- Numbers that JSON cannot write are the texts "NaN", "Infinity" and "-Infinity".
- A process that is killed may leave its last line torn; the next one begins a new line. Readers pass over such a line.
- A run that is resumed appends, beginning with a `RunStarted`. Events that an earlier process wrote for steps after its
  `resumed_step` are void, and with `resumed_step` null all earlier ones: those steps are done again.
- New fields may appear within a version; readers pass over what they do not know. Everything else raises the version.
- Version 2 adds `EffectiveBatchChanged`, `OverflowArenaChanged`, `MemoryReclaimed`, `LookAheadChanged` and
  `SelfChecked` to version 1 and changes nothing else. `gracetune report` reads both, also mixed in one log.
- Secrets of the configuration and of the environment are written as `(hidden)` (docs/configuration.md, "Secrets").
- With several processes, events about memory are those of the first one.
"""


if __name__ == "__main__":
    sys.stdout.write(document())
