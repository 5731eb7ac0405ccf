"""What a family's layers are called: in diffusers' model, and in the model as it was first published.

Other programs name adapter layers after the second (ComfyUI keeps the original layout), some with every dot turned
into an underscore. A name with underscores cannot be taken apart by looking at it, so nothing here guesses: a family
lists every layer it has, and a name is one of them or unknown.

A template is a layer's path with `{}` for each counted block: `blocks.{}.attn1.to_q`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Layout = Literal["diffusers", "original"]

_COUNT = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]*)(?![0-9])")
"""As `str` writes a number: `00` and the digits of other scripts are no numbers, or two names would be one layer's."""
_NUMBER = re.compile(rf"\{{\}}|{_COUNT.pattern}")
_LONGEST = 500
"""No layer's name is longer. A number of thousands of digits would be an error instead of no name."""


@dataclass(frozen=True)
class Rule:
    """One layer under both names."""

    ours: str
    original: str
    halves_swapped: bool = False
    """The two halves of its output rows have changed places between the layouts (shift and scale of a final norm)."""


@dataclass(frozen=True)
class Fused:
    """Several of diffusers' layers that are one matrix in the original, stacked by output rows."""

    original: str
    parts: tuple[tuple[str, int], ...]
    """Template and its share of the rows: query, key and value have one each, Flux' feed-forward four."""


@dataclass(frozen=True)
class Place:
    """What a name stands for: one layer, or the layers a fused matrix consists of."""

    paths: tuple[str, ...]
    layout: Layout
    shares: tuple[int, ...] = (1,)
    halves_swapped: bool = False

    @property
    def fused(self) -> bool:
        return len(self.paths) > 1


@dataclass(frozen=True)
class Original:
    """A layer's name in the original layout, and everything that shares it."""

    name: str
    place: Place
    part: int
    """Which of `place.paths` was asked for."""


@dataclass(frozen=True)
class _Template:
    text: str
    numbers: tuple[int | None, ...]

    @classmethod
    def of(cls, text: str) -> _Template:
        return cls(text, tuple(None if found == "{}" else int(found) for found in _NUMBER.findall(text)))

    def counts_in(self, numbers: tuple[int, ...]) -> tuple[int, ...] | None:
        """The block numbers in a name of this shape; None where another number differs."""
        if len(numbers) != len(self.numbers):  # a name with a `#` of its own
            return None
        if any(wanted not in (None, found) for wanted, found in zip(self.numbers, numbers, strict=True)):
            return None
        return tuple(found for wanted, found in zip(self.numbers, numbers, strict=True) if wanted is None)


@dataclass(frozen=True, eq=False)  # one of each: a key of caches, by identity
class KeyMap:
    """All layers of one family."""

    family: str
    component: str
    """The denoiser's name in diffusers' pipeline, which begins its keys: transformer, unet."""
    rules: tuple[Rule, ...]
    fused: tuple[Fused, ...] = ()
    other_names: tuple[tuple[str, str], ...] = ()
    """Templates of a program that calls the original's layers otherwise, each with the original's. Only read."""
    experts: bool = False
    """Whether there are files of a high-noise and a low-noise expert."""
    depths: tuple[tuple[str, int], ...] = ()
    """The most blocks a published model has under a name: tells families apart whose layers are called the same."""
    comfyui_takes_ours: bool = False
    """ComfyUI loads `<component>.<diffusers path>` for this family. True where the original layout is fused."""
    architecture: str = ""
    """What the headers of files call the model (`modelspec.architecture`); empty: the family's own name."""
    base_version: str = ""
    """The same in kohya's words (`ss_base_model_version`); empty: not written."""
    of_experts: tuple[str, str] | None = None
    """Both of these for weights with two experts, where they are called otherwise."""
    also_read_by: tuple[tuple[str, str], ...] = ()
    """Formats of adapter files and programs that know this family's names in them, beside those that always do: each
    pair is (format, program), as in `config/export_formats.py`."""
    header_marks: tuple[str, ...] = ()
    """Texts in those entries, or in an entry of our own, by which a file's header names this family."""

    def find(self, name: str) -> Place | None:
        """The layer a name stands for, in either layout, with dots or underscores."""
        if len(name) > _LONGEST:
            return None
        entries = self._names.get(_shape(name))
        if entries is None:
            return None
        numbers = _numbers(name)
        for template, index in entries:
            counts = template.counts_in(numbers)
            if counts is None:
                continue
            if index < len(self.templates):
                return Place((self.templates[index].format(*counts),), "diffusers")
            return self._place(index - len(self.templates), counts)
        return None

    def original(self, path: str) -> Original | None:
        """What the original model calls diffusers' layer `path`; None where the family has no such layer."""
        numbers = _numbers(path)
        for template, index in self._ours.get(_shape(path), ()):
            counts = template.counts_in(numbers)
            if counts is not None:
                return self._original(index, counts, path)
        return None

    def knows(self, path: str) -> bool:
        return self.original(path) is not None

    def in_order(self, paths: Iterable[str]) -> list[str]:
        """Block by block, and within a block in the order the family lists its layers."""
        return sorted(paths, key=self._position)

    def beyond_depth(self, path: str) -> bool:
        """Whether no published model of this family has that many blocks."""
        for prefix, most in self.depths:
            found = re.match(rf"{re.escape(prefix)}\.([0-9]+)\.", path)
            if found and int(found.group(1)) >= most:
                return True
        return False

    @cached_property
    def templates(self) -> tuple[str, ...]:
        """Every layer's template in diffusers' model."""
        return (*(rule.ours for rule in self.rules), *(part for fused in self.fused for part, _ in fused.parts))

    # -- looking up ---------------------------------------------------------------------------------------------------

    def _place(self, index: int, counts: tuple[int, ...]) -> Place:
        """Of the original layout's entry `index`: rules first, then fused matrices."""
        if index < len(self.rules):
            rule = self.rules[index]
            return Place((rule.ours.format(*counts),), "original", halves_swapped=rule.halves_swapped)
        fused = self.fused[index - len(self.rules)]
        paths = tuple(part.format(*counts) for part, _ in fused.parts)
        return Place(paths, "original", tuple(share for _, share in fused.parts))

    def _original(self, index: int, counts: tuple[int, ...], path: str) -> Original:
        entry = self._entry_of_part[index]
        place = self._place(entry, counts)
        text = self.rules[entry].original if entry < len(self.rules) else self.fused[entry - len(self.rules)].original
        return Original(text.format(*counts), place, place.paths.index(path))

    @cached_property
    def _entry_of_part(self) -> tuple[int, ...]:
        """For each template, the index of its entry in the original layout."""
        rules = tuple(range(len(self.rules)))
        parts = tuple(len(rules) + index for index, fused in enumerate(self.fused) for _ in fused.parts)
        return rules + parts

    @cached_property
    def _ours(self) -> _Table:
        return _table(self.templates)

    @cached_property
    def _names(self) -> _Table:
        """Every spelling of every layer; ours come first, so that a name both layouts have is diffusers'."""
        originals = (*(rule.original for rule in self.rules), *(fused.original for fused in self.fused))
        dotted = (*self.templates, *originals)
        table = _table(dotted)
        for shape, entries in _table(text.replace(".", "_") for text in dotted).items():
            table.setdefault(shape, []).extend(entry for entry in entries if entry not in table.get(shape, ()))
        index_of = {text: len(self.templates) + index for index, text in enumerate(originals)}
        for other, original in self.other_names:
            table.setdefault(_blotted(other), []).append((_Template.of(other), index_of[original]))
        return table

    def _position(self, path: str) -> tuple[int, tuple[int, ...], int]:
        numbers = _numbers(path)
        for template, index in self._ours.get(_shape(path), ()):
            counts = template.counts_in(numbers)
            if counts is not None:
                return self._groups[index], counts, index
        return len(self.templates), (), 0

    @cached_property
    def _groups(self) -> tuple[int, ...]:
        """For each template the first one that repeats with the same blocks."""
        first: dict[str, int] = {}
        return tuple(
            first.setdefault(text.rpartition("{}")[0] or text, index) for index, text in enumerate(self.templates)
        )


_Table = dict[str, list[tuple[_Template, int]]]


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(found) for found in _COUNT.findall(name))


def _shape(name: str) -> str:
    return _COUNT.sub("#", name)


def _table(templates: Iterable[str]) -> _Table:
    """Templates by their text with every number blotted out, so that a look-up compares a handful instead of all."""
    table: _Table = {}
    for index, text in enumerate(templates):
        table.setdefault(_blotted(text), []).append((_Template.of(text), index))
    return table


def _blotted(template: str) -> str:
    return _shape(template.replace("{}", "0"))
