"""Base classes of the errors a user can cause. The command line prints their message and exits with code 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from gracetune.redaction import redact


@dataclass(frozen=True)
class Problem:
    """One problem with the user's input: what was found, what was expected and what to do. Secrets are redacted."""

    key: str
    """The setting, file or object concerned."""
    found: str
    expected: str
    hint: str
    """What to type or change."""
    file: str | None = None
    """The file that `key` is in, if any."""

    def __post_init__(self) -> None:
        for field in fields(self):
            text = vars(self)[field.name]
            if text is not None:
                object.__setattr__(self, field.name, redact(text))

    def __str__(self) -> str:
        location = f"{visible(self.file)}: {short(self.key)}" if self.file else short(self.key)
        found, expected, hint = map(visible, (self.found, self.expected, self.hint))
        return f"{location}\n  found     {found}\n  expected  {expected}\n  try       {hint}"


def visible(text: str) -> str:
    """The text on one line, with control characters escaped: a terminal would act on them, and so would a comment."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def short(text: str, most: int = 160) -> str:
    """Untrusted text for a message: control characters escaped, and the middle left out if it is long."""
    shown = visible(text[: 2 * most]) if len(text) > 2 * most else visible(text)
    if len(text) <= most and len(shown) <= most:
        return shown
    return f"{shown[: most // 2]}... ({len(text):,} characters) ...{visible(text[-most // 4 :])}"


class GracetuneError(Exception):
    """The base class of all errors we raise on purpose. Secrets in its message are redacted."""

    def __init__(self, *texts: object) -> None:
        super().__init__(*(redact(text) if isinstance(text, str) else text for text in texts))


class ConfigError(GracetuneError):
    """A configuration cannot be used. Carries all of its problems, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        if not self.problems:
            raise ValueError("a ConfigError needs at least one problem to report")
        super().__init__("\n".join(str(problem) for problem in self.problems))


class MachineError(GracetuneError):
    """This machine cannot do what the user requested. The message ends with the remedy."""
