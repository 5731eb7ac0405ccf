"""Limits on the size of a configuration, and bounds of values that are not part of a field's type.

Reading a file within these limits takes less than two seconds and little memory, whatever its content. A file beyond
them is an error that names the limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from gracetune.units import GIB, KIB

LARGEST_FILE = 512 * KIB
"""Applies to a configuration, to a file that it names, and to its text after variables are substituted. It is far more
than any program writes."""
DEEPEST = 50
MOST_VALUES = 16_000
"""Aliases are counted as often as they are used."""
MOST_ENTRIES = 1_000
"""Most mappings in one list, such as datasets."""
LONGEST_TEXT = 32_768
"""Most characters of one value. A model reads only the first few thousand of a prompt."""
LONGEST_KEY = 1000
"""Counted with YAML's escapes. A longer key could not be read back from the output of `config show`."""
LONGEST_NUMBER = 1024
"""In bits. Larger integers do not fit a float."""
MOST_PROBLEMS = 200
"""A file with more problems is probably not a configuration at all."""
LONGEST_NAME = 100
"""Longest name for which a similar one is searched. The search takes time proportional to this times `MOST_NAMES`."""
MOST_NAMES = 2_000

MOST_CAPTIONS = 1_000
"""Most captions of one image. Each has at most `LONGEST_TEXT` characters, and their file `LARGEST_FILE` bytes."""
MOST_COLUMNS = 1_000
LARGEST_TABLE = 2 * GIB
"""Largest file with the captions of a whole dataset."""

LARGEST_RANK = 16_384
"""Largest rank of algorithms whose factors are as wide as the rank. No supported model has a wider matrix."""
MOST_MEGAPIXELS = 64.0
"""8000 x 8000 pixels. A larger number was almost certainly meant in pixels."""


class NotPlainError(ValueError):
    """Data whose structure or size is invalid as a whole, so that no part of it can be used."""

    def __init__(self, found: str, expected: str, hint: str) -> None:
        super().__init__(f"{found}; expected {expected}")
        self.found, self.expected, self.hint = found, expected, hint


def too_deep() -> NotPlainError:
    return NotPlainError("nesting deeper than any configuration needs", f"at most {DEEPEST} levels", "nest less deeply")


def too_many_values(hint: str) -> NotPlainError:
    return NotPlainError(f"more than {MOST_VALUES:,} values", "fewer", hint)


def too_many_entries(count: int) -> NotPlainError:
    return NotPlainError(
        f"a list of {count:,} mappings", f"at most {MOST_ENTRIES:,}", "check that this is the right file"
    )


def too_large() -> NotPlainError:
    hint = "check that this is the right file; captions and prompts belong in files of their own"
    return NotPlainError(f"more than {LARGEST_FILE // KIB} KiB of text", f"at most {LARGEST_FILE // KIB} KiB", hint)


def too_long() -> NotPlainError:
    hint = "shorten it, or what is filled in"
    return NotPlainError(f"a text of more than {LONGEST_TEXT:,} characters", "a shorter one", hint)


def replaced(text: str, old: str, new: str) -> str:
    """Like `str.replace`, but raises NotPlainError if the result is longer than a value can be."""
    if len(text) + text.count(old) * (len(new) - len(old)) > max(len(text), LONGEST_TEXT):
        raise too_long()
    return text.replace(old, new)


def substituted(pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str], text: str) -> str:
    """Like `Pattern.sub`, but raises NotPlainError if the result is longer than a value can be."""
    return joined(_parts(pattern, replace, text), max(len(text), LONGEST_TEXT))


def _parts(pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str], text: str) -> Iterable[str]:
    end = 0
    for match in pattern.finditer(text):
        yield text[end : match.start()]
        yield replace(match)
        end = match.end()
    yield text[end:]


def joined(parts: Iterable[str], most: int = LARGEST_FILE) -> str:
    """Like `"".join`, but raises NotPlainError as soon as the result has more than `most` characters."""
    kept: list[str] = []
    length = 0
    for part in parts:
        length += len(part)
        if length > most:
            raise too_long() if most < LARGEST_FILE else too_large()
        kept.append(part)
    return "".join(kept)
