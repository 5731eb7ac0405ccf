"""Errors that a user can cause and fix. The command line prints their message."""

from __future__ import annotations

from gracetune.redaction import redact


class TelemetryError(Exception):
    """A log, tracker or report cannot be used. The message says what was found, what was expected and what to type."""

    def __init__(self, key: str, *, found: str, expected: str, hint: str) -> None:
        key, found, expected, hint = map(redact, (key, found, expected, hint))
        super().__init__(f"{key}\n  found     {found}\n  expected  {expected}\n  try       {hint}")
        self.key, self.found, self.expected, self.hint = key, found, expected, hint
