"""Replies of the studio's server: JSON without non-finite numbers, and errors with what was found, what was
expected and what to type."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gracetune.errors import ConfigError, GracetuneError, Problem, visible
from gracetune.storage.os_errors import explain

MOST_BODY = 8 << 20
"""Largest request body in bytes."""


class StudioError(Exception):
    """A request that cannot be answered. `status` is the HTTP status, 400 to 499."""

    def __init__(self, status: int, found: str, expected: str, hint: str) -> None:
        super().__init__(found)
        self.status, self.found, self.expected, self.hint = status, found, expected, hint

    @classmethod
    def of(cls, error: GracetuneError, status: int = 400) -> StudioError:
        """The same error for the browser; of several problems the first, with the number of the others."""
        if not isinstance(error, ConfigError):
            return cls(status, str(error), "a valid request", "correct what the message names and try again")
        first, *others = error.problems
        more = f" (and {len(others)} more)" if others else ""
        return cls(status, f"{_location(first)}{first.found}{more}", first.expected, first.hint)


def _location(problem: Problem) -> str:
    return f"{problem.key}: " if problem.key else ""


def json_reply(value: Any, status: int = 200) -> Response:
    """A JSON response. Non-finite numbers become null, lone surrogates (from file names) are escaped."""
    return Response(json_bytes(value), status, media_type="application/json", headers={"cache-control": "no-store"})


def json_bytes(value: Any) -> bytes:
    # ensure_ascii: a prompt or a file name may hold lone surrogates, which UTF-8 cannot encode.
    return json.dumps(finite(value), allow_nan=False, separators=(",", ":")).encode()


def finite(value: Any) -> Any:
    """The value with null for NaN and infinity, and lists for tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def error_reply(error: StudioError) -> Response:
    body = {"found": visible(error.found), "expected": error.expected, "hint": error.hint}
    return json_reply({"error": body}, error.status)


def os_error_reply(error: OSError) -> Response:
    """The reply where the operating system rejected an operation: a folder that vanished, a file of another user."""
    cause = explain(error, Path(error.filename if isinstance(error.filename, str) else "."))
    return error_reply(StudioError(409, cause.found, cause.expected, cause.remedy))


async def json_body(request: Request) -> dict[str, Any]:
    """The object in a request's body. Its size is limited by `access`."""
    try:
        value = json.loads(await request.body() or b"{}")
    except (ValueError, RecursionError) as error:
        raise StudioError(400, f"an invalid JSON body: {error}", "a JSON object", "send application/json") from None
    if not isinstance(value, dict):
        raise StudioError(400, f"a JSON {type(value).__name__}", "a JSON object", 'for example {"text": "a cat"}')
    return value


def integer(request: Request, name: str, default: int, low: int, high: int) -> int:
    """A whole number of the query, kept inside [low, high]."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.lstrip("-").isdigit() or len(text) > 18:
        raise StudioError(400, f"{name}={text[:40]!r}", f"a whole number from {low} to {high}", f"{name}={default}")
    return min(high, max(low, int(text)))
