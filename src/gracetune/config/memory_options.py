"""The unified-memory options, under the names that the GH200 guides use. `docs/memory.md` explains each.

`split_alloc_conf` reads them from PyTorch's allocator string. The rest of that string stays as written.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field, Strict

from gracetune.config.base import Flag, OpenFraction, Section
from gracetune.config.spelling import nearest
from gracetune.errors import Problem
from gracetune.units import MIB, parse_bytes

AccessPattern = Literal["gpu_first", "balanced", "cpu_first"]


class MemoryOptions(Section):
    """Overflow arena, governor and residency hints."""

    use_uvm: Flag = False
    """Reserve the overflow arena in managed memory and run the two-stage governor."""
    uvm_oversubscription_ratio: Annotated[float, Strict(), Field(gt=1.0, le=1000)] = 5.0
    """Size of the arena: (ratio - 1) x the GPU's memory, limited to what the host can spare."""
    uvm_access_pattern: AccessPattern = "cpu_first"
    """Preferred location of the arena's pages."""
    uvm_stage1_threshold: OpenFraction = 0.10
    """Memory pressure begins when less than this fraction of the GPU's memory is available."""
    uvm_stage1_min_bytes: Annotated[int, Strict(), Field(ge=0, lt=2**63)] = 0
    """The same threshold in bytes; the larger of the two applies."""
    enable_uvm_hints: Flag | None = None
    """Residency hints and caches in managed memory. `true` keeps caches of type `unified_memory` in managed memory on
    every GPU that supports it; `false` uses neither; unset follows the cache types and the measured speeds."""


# -- in an allocator string --------------------------------------------------------------------------------------------

OptionValue = bool | float | int | str
_LONGEST_COUNT = 18
"""Most digits of a number of bytes. 10^18 is more than any machine has, and still fits 64 bits."""

OPTION_NAMES = (
    "use_uvm",
    "uvm_oversubscription_ratio",
    "uvm_access_pattern",
    "uvm_stage1_threshold",
    "uvm_stage1_min_bytes",
)


@dataclass(frozen=True)
class AllocConf:
    options: dict[str, OptionValue]
    rest: str
    """The options that remain for PyTorch, exactly as they were written."""
    problems: tuple[Problem, ...]


def split_alloc_conf(text: str, variable: str) -> AllocConf:
    """Take the unified-memory options out of an allocator string such as `use_uvm:True,max_split_size_mb:512`."""
    options: dict[str, OptionValue] = {}
    problems: list[Problem] = []
    rest: list[str] = []
    for item in _items(text):
        name = item.split(":", 1)[0].strip()
        if not _is_ours(name.split("=", 1)[0]):
            rest.append(item)
            continue
        parsed = _option(item, variable)
        if isinstance(parsed, Problem):
            problems.append(parsed)
        elif parsed[0] in options:
            problems.append(Problem(variable, f"{parsed[0]} twice", "each option once", "keep one of the two"))
        else:
            options[parsed[0]] = parsed[1]
    return AllocConf(options, ",".join(rest), tuple(problems))


def _items(text: str) -> list[str]:
    """Split at commas, but not inside brackets: `roundup_power2_divisions:[256:1,512:2]` is one item."""
    items, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            items.append(text[start:position])
            start = position + 1
    return [*items, text[start:]] if text else []


def _is_ours(name: str) -> bool:
    """Whether a name is one of ours or a misspelling of one. PyTorch could not suggest `use_uvm` for `use_uvmm`."""
    lowered = name.strip().lower()
    return lowered.startswith("uvm_") or bool(difflib.get_close_matches(lowered, OPTION_NAMES, n=1, cutoff=0.8))


def _option(item: str, variable: str) -> tuple[str, OptionValue] | Problem:
    name, colon, value = (part.strip() for part in item.partition(":"))
    if not colon:
        bare = item.split("=", 1)[0].strip()
        bare = nearest(bare, OPTION_NAMES) or bare
        return Problem(variable, item.strip(), f"{bare}:VALUE", f"put a colon between name and value: {bare}:...")
    if name not in OPTION_NAMES:
        near = nearest(name, OPTION_NAMES)
        expected = f"one of {', '.join(OPTION_NAMES)}"
        hint = f"write {near}:{_corrected(near, value)}" if near else "remove it"
        return Problem(variable, f"the option {name}", expected, hint)
    try:
        return name, _VALUES[name](value)
    except _WrongValueError as error:
        return Problem(variable, item.strip(), error.expected, f"write {name}:{error.example}")


def _corrected(name: str, value: str) -> str:
    """Return the value if the option accepts it, else a value that it accepts."""
    try:
        _VALUES[name](value)
    except _WrongValueError as error:
        return error.example
    return value


class _WrongValueError(ValueError):
    def __init__(self, expected: str, example: str) -> None:
        super().__init__(expected)
        self.expected, self.example = expected, example


def _switch(text: str) -> bool:
    # PyTorch accepts only these two spellings, and so did the patched PyTorch that these strings were written for.
    if text not in ("True", "False"):
        raise _WrongValueError("True or False, with a capital letter", "False" if text.lower() == "false" else "True")
    return text == "True"


def _ratio(text: str) -> float:
    value = _number(text)
    if not value > 1.0:
        raise _WrongValueError("a finite number greater than 1, without a unit", "5.0")
    return value


def _threshold(text: str) -> float:
    value = _number(text)
    if not 0.0 < value < 1.0:
        raise _WrongValueError("a number between 0 and 1", "0.10")
    return value


def _byte_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _LONGEST_COUNT):
        raise _WrongValueError("a whole number of bytes, 0 or more", str(_meant_bytes(text)))
    return int(text)


def _meant_bytes(text: str) -> int:
    """Convert `1e9` or `1GiB` to a number of bytes, for the hint. Returns the default, 0, for anything else."""
    number = _number(text)
    if 0 <= number < 10**_LONGEST_COUNT:
        return int(number)
    try:
        size = parse_bytes(text)
    except (ValueError, OverflowError):
        return 0
    return size if size < 10**_LONGEST_COUNT else 0


def _pattern(text: str) -> str:
    choices = get_args(AccessPattern)
    if text not in choices:
        raise _WrongValueError(f"one of {', '.join(choices)}", nearest(text, choices) or "cpu_first")
    return text


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


_VALUES: dict[str, Callable[[str], OptionValue]] = {
    "use_uvm": _switch,
    "uvm_oversubscription_ratio": _ratio,
    "uvm_access_pattern": _pattern,
    "uvm_stage1_threshold": _threshold,
    "uvm_stage1_min_bytes": _byte_count,
}


def parse_option(name: str, value: str, variable: str) -> OptionValue | Problem:
    """Parse an option that has an environment variable of its own (`GH200_UVM_*`)."""
    parsed = _option(f"{name}:{value}", variable)
    if isinstance(parsed, Problem):
        hint = parsed.hint.replace(f"write {name}:", f"export {variable}=")
        return Problem(variable, value, parsed.expected, hint)
    return parsed[1]


def max_split_bytes(text: str) -> int | None:
    """Return PyTorch's `max_split_size_mb` in bytes. Larger blocks are never split; None means no limit."""
    for item in _items(text):
        name, _, value = (part.strip() for part in item.partition(":"))
        if name == "max_split_size_mb" and value.isascii() and value.isdecimal() and len(value) <= _LONGEST_COUNT:
            return int(value) * MIB
    return None
