"""Every error a user can cause, and nothing else. The command line turns these into a message and exit code 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from gracetune.redaction import redact


@dataclass(frozen=True)
class Problem:
    """One thing wrong with what we were given, written for someone reading it at night. Holds no secret."""

    key: str
    found: str
    expected: str
    hint: str
    file: str | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            text = vars(self)[one.name]
            if text is not None:
                object.__setattr__(self, one.name, redact(text))

    def __str__(self) -> str:
        where = f"{self.file}: {self.key}" if self.file else self.key
        return f"{where}\n  found     {self.found}\n  expected  {self.expected}\n  try       {self.hint}"


class GracetuneError(Exception):
    """The base of everything we raise on purpose. Its text holds no secret."""

    def __init__(self, *texts: object) -> None:
        super().__init__(*(redact(text) if isinstance(text, str) else text for text in texts))


class ConfigError(GracetuneError):
    """A configuration cannot be used; carries all of its problems, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        if not self.problems:
            raise ValueError("a ConfigError without problems would tell the user nothing")
        super().__init__("\n".join(str(problem) for problem in self.problems))


class MachineError(GracetuneError):
    """This machine cannot do what was asked; the message ends with the remedy."""
