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
        where = f"{visible(self.file)}: {short(self.key)}" if self.file else short(self.key)
        found, expected, hint = map(visible, (self.found, self.expected, self.hint))
        return f"{where}\n  found     {found}\n  expected  {expected}\n  try       {hint}"


def visible(text: str) -> str:
    """The text on one line, with an escape for whatever a terminal or a comment would act on."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def short(text: str, most: int = 160) -> str:
    """A name out of a file that anyone may have made, for a message: visible, its middle left out where it is long."""
    shown = visible(text[: 2 * most]) if len(text) > 2 * most else visible(text)
    if len(text) <= most and len(shown) <= most:
        return shown
    return f"{shown[: most // 2]}... ({len(text):,} characters) ...{visible(text[-most // 4 :])}"


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
