"""How large a configuration may be, and everything in it whose bound does not stand in the type of its field.

Reading a file within these limits takes less than two seconds and little memory, whatever is in it. What is beyond them
is an error that names the limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from gracetune.units import GIB, KIB

LARGEST_FILE = 512 * KIB
"""Of a configuration, of a file that one names, and of a text after its variables are filled in: far more than any
program writes."""
DEEPEST = 50
MOST_VALUES = 16_000
"""Aliases are counted as often as they are used."""
MOST_ENTRIES = 1_000
"""Mappings in one list, such as datasets."""
LONGEST_TEXT = 32_768
"""Characters of one value: a model reads the first few thousand of a prompt."""
LONGEST_KEY = 1000
"""As YAML writes it: a longer one could not be read back from what `config show` prints."""
LONGEST_NUMBER = 1024
"""In bits: what still fits a float."""
MOST_PROBLEMS = 200
"""A file with more of them is something else than it is taken for."""
LONGEST_NAME = 100
"""Of a name that is compared with others, and how many of these: finding the most similar one takes their product."""
MOST_NAMES = 2_000

MOST_CAPTIONS = 1_000
"""Of one picture. Each is no longer than a value of a configuration, and its file no larger than one."""
MOST_COLUMNS = 1_000
LARGEST_TABLE = 2 * GIB
"""Of the captions of a whole dataset in one file."""

LARGEST_RANK = 16_384
"""Of factors that are as wide as the rank, whatever the matrix is: no model here has a matrix with more to learn."""
MOST_MEGAPIXELS = 64.0
"""8000 x 8000. Whoever writes more has written pixels."""


class NotPlainError(ValueError):
    """Data whose very shape or size is wrong: nothing in it can be used."""

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
    """`str.replace`, except that the result is no longer than a value may be."""
    if len(text) + text.count(old) * (len(new) - len(old)) > max(len(text), LONGEST_TEXT):
        raise too_long()
    return text.replace(old, new)


def substituted(pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str], text: str) -> str:
    """`Pattern.sub`, except that the result is no longer than a value may be."""
    return joined(_parts(pattern, replace, text), max(len(text), LONGEST_TEXT))


def _parts(pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str], text: str) -> Iterable[str]:
    end = 0
    for match in pattern.finditer(text):
        yield text[end : match.start()]
        yield replace(match)
        end = match.end()
    yield text[end:]


def joined(parts: Iterable[str], most: int = LARGEST_FILE) -> str:
    """The pieces one after the other; NotPlainError as soon as they are longer than `most`."""
    kept: list[str] = []
    length = 0
    for part in parts:
        length += len(part)
        if length > most:
            raise too_long() if most < LARGEST_FILE else too_large()
        kept.append(part)
    return "".join(kept)
