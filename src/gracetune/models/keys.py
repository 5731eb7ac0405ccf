"""The names of a family's layers: in diffusers' model, and in the originally published one.

Other programs use the original names for adapter layers (ComfyUI keeps the original layout), some with every dot
replaced by an underscore. Such a name cannot be split reliably, so nothing here guesses: a family lists every layer it
has, and a name is either one of them or unknown.

A template is a layer's path with `{}` for each block number: `blocks.{}.attn1.to_q`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

Layout = Literal["diffusers", "original"]

_COUNT = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]*)(?![0-9])")
"""A number as `str` writes it. Were `00` or digits of other scripts numbers too, two names could mean one layer."""
_NUMBER = re.compile(rf"\{{\}}|{_COUNT.pattern}")
_LONGEST = 500
"""No layer's name is longer. Without a limit, a number of thousands of digits would make `int` raise."""


@dataclass(frozen=True)
class KeyMapRule:
    """One layer: its template in diffusers' model and in the original."""

    ours: str
    original: str
    halves_swapped: bool = False
    """The two halves of its output rows are swapped between the layouts (shift and scale of a final norm)."""


@dataclass(frozen=True)
class Fused:
    """Several of diffusers' layers that are one matrix in the original, stacked along the output rows."""

    original: str
    parts: tuple[tuple[str, int], ...]
    """Template and share of the rows: 1 each for query, key and value, 4 for Flux' feed-forward."""


@dataclass(frozen=True)
class MappedLayers:
    """The layer a name refers to, or the layers a fused matrix consists of."""

    paths: tuple[str, ...]
    layout: Layout
    shares: tuple[int, ...] = (1,)
    halves_swapped: bool = False

    @property
    def fused(self) -> bool:
        return len(self.paths) > 1


@dataclass(frozen=True)
class Original:
    """A layer's name in the original layout, and all layers that share it."""

    name: str
    mapped: MappedLayers
    part: int
    """Index in `mapped.paths` of the layer that was looked up."""


@dataclass(frozen=True)
class _Template:
    """A template whose numbers are compared by value. None stands for any block number."""

    text: str
    numbers: tuple[int | None, ...]

    @classmethod
    def of(cls, text: str) -> _Template:
        return cls(text, tuple(None if found == "{}" else int(found) for found in _NUMBER.findall(text)))

    def counts_in(self, numbers: tuple[int, ...]) -> tuple[int, ...] | None:
        """The block numbers of a name of this shape; None if one of its other numbers differs."""
        if len(numbers) != len(self.numbers):  # the name contains a `#` itself
            return None
        if any(wanted not in (None, found) for wanted, found in zip(self.numbers, numbers, strict=True)):
            return None
        return tuple(found for wanted, found in zip(self.numbers, numbers, strict=True) if wanted is None)


@dataclass(frozen=True, eq=False)  # one of each: a key of caches, by identity
class KeyMap:
    """All layers of one family, under every name."""

    family: str
    component: str
    """The denoiser's component in diffusers' pipeline (transformer, unet): the prefix of its keys."""
    rules: tuple[KeyMapRule, ...]
    fused: tuple[Fused, ...] = ()
    other_names: tuple[tuple[str, str], ...] = ()
    """(template of another program, template of the original) for the same layer. Only used for reading."""
    experts: bool = False
    """Whether files of a high-noise and a low-noise expert exist."""
    depths: tuple[tuple[str, int], ...] = ()
    """(list of blocks, most blocks any published model has). Distinguishes families with equal layer names."""
    shapes: tuple[tuple[str, Fraction], ...] = ()
    """(template of the original, rows by columns of its matrix). Distinguishes families with equal layer names."""
    pipeline_loads_lora: bool = True
    """Whether the pipeline of diffusers has `load_lora_weights`."""
    comfyui_takes_ours: bool = False
    """Whether ComfyUI loads diffusers' paths for this family. True if the original layout is fused."""
    comfyui_prefix: str = "{}."
    """The prefix of these paths in a file for ComfyUI; `{}` is the component."""
    converter_reads_alpha: bool = True
    """Whether diffusers' converter for other programs' files of this family reads alphas instead of rejecting them."""
    architecture: str = ""
    """The model's name in file headers (`modelspec.architecture`). Empty: the family's name."""
    base_version: str = ""
    """The same in kohya's headers (`ss_base_model_version`). Empty: not written."""
    of_experts: tuple[str, str] | None = None
    """(architecture, base_version) for weights with two experts, if they differ from those above."""
    also_read_by: tuple[tuple[str, str], ...] = ()
    """(format, program) pairs, as in `config/registry.py`: programs that read this family's names in a format, in
    addition to those that read every family."""
    header_marks: tuple[str, ...] = ()
    """Texts in those header entries, or in our own, that identify this family."""

    def find(self, name: str) -> MappedLayers | None:
        """The layer a name refers to, in either layout, with dots or underscores."""
        if len(name) > _LONGEST:
            return None
        entries = self._names.get(_shape(name))
        if entries is None:
            return None
        numbers = _numbers(name)
        # Few templates share a shape; their fixed numbers decide. Indexes from `len(self.templates)` on are entries of
        # the original layout.
        for template, index in entries:
            counts = template.counts_in(numbers)
            if counts is None:
                continue
            if index < len(self.templates):
                return MappedLayers((self.templates[index].format(*counts),), "diffusers")
            return self._mapped(index - len(self.templates), counts)
        return None

    def original(self, path: str) -> Original | None:
        """The original model's name of diffusers' layer `path`; None if the family has no such layer."""
        numbers = _numbers(path)
        for template, index in self._ours.get(_shape(path), ()):
            counts = template.counts_in(numbers)
            if counts is not None:
                return self._original(index, counts, path)
        return None

    def has(self, path: str) -> bool:
        """Whether the family has this layer of diffusers' model."""
        return self.original(path) is not None

    def in_order(self, paths: Iterable[str]) -> list[str]:
        """Sorted block by block, and within a block in the order the family lists its layers."""
        return sorted(paths, key=self._position)

    def beyond_depth(self, path: str) -> bool:
        """Whether no published model of this family has so many blocks."""
        for prefix, most in self.depths:
            found = re.match(rf"{re.escape(prefix)}\.([0-9]+)\.", path)
            if found and int(found.group(1)) >= most:
                return True
        return False

    def rows_by_columns(self, name: str) -> Fraction | None:
        """The shape of the original layer `name`, if `shapes` lists it."""
        for template, ratio in self.shapes:
            if re.fullmatch(re.escape(template).replace(r"\{\}", "[0-9]+"), name):
                return ratio
        return None

    @cached_property
    def templates(self) -> tuple[str, ...]:
        """The template of every layer in diffusers' model."""
        return (*(rule.ours for rule in self.rules), *(part for fused in self.fused for part, _ in fused.parts))

    # -- look-up tables ------------------------------------------------------------------------------------------------

    def _mapped(self, index: int, counts: tuple[int, ...]) -> MappedLayers:
        """The layers of entry `index` of the original layout: rules first, then fused matrices."""
        if index < len(self.rules):
            rule = self.rules[index]
            return MappedLayers((rule.ours.format(*counts),), "original", halves_swapped=rule.halves_swapped)
        fused = self.fused[index - len(self.rules)]
        paths = tuple(part.format(*counts) for part, _ in fused.parts)
        return MappedLayers(paths, "original", tuple(share for _, share in fused.parts))

    def _original(self, index: int, counts: tuple[int, ...], path: str) -> Original:
        """The original name of the layer with template `index`."""
        entry = self._entry_of_part[index]
        mapped = self._mapped(entry, counts)
        text = self.rules[entry].original if entry < len(self.rules) else self.fused[entry - len(self.rules)].original
        return Original(text.format(*counts), mapped, mapped.paths.index(path))

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
        """Every spelling of every layer. diffusers' names come first, so a name that both layouts have is
        diffusers'."""
        originals = (*(rule.original for rule in self.rules), *(fused.original for fused in self.fused))
        dotted = (*self.templates, *originals)
        table = _table(dotted)
        for shape, entries in _table(text.replace(".", "_") for text in dotted).items():
            table.setdefault(shape, []).extend(entry for entry in entries if entry not in table.get(shape, ()))
        index_of = {text: len(self.templates) + index for index, text in enumerate(originals)}
        for other, original in self.other_names:
            table.setdefault(_shape_of_template(other), []).append((_Template.of(other), index_of[original]))
        return table

    def _position(self, path: str) -> tuple[int, tuple[int, ...], int]:
        """Sort key of `in_order`: group of the layer, its block numbers, its place in the list."""
        numbers = _numbers(path)
        for template, index in self._ours.get(_shape(path), ()):
            counts = template.counts_in(numbers)
            if counts is not None:
                return self._groups[index], counts, index
        return len(self.templates), (), 0

    @cached_property
    def _groups(self) -> tuple[int, ...]:
        """For each template, the first template that is repeated with the same blocks."""
        first: dict[str, int] = {}
        return tuple(
            first.setdefault(text.rpartition("{}")[0] or text, index) for index, text in enumerate(self.templates)
        )


_Table = dict[str, list[tuple[_Template, int]]]


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(found) for found in _COUNT.findall(name))


def _shape(name: str) -> str:
    """The name with every number replaced by `#`."""
    return _COUNT.sub("#", name)


def _table(templates: Iterable[str]) -> _Table:
    """Templates by shape (the text with `#` for numbers), so that a look-up compares a handful instead of all."""
    table: _Table = {}
    for index, text in enumerate(templates):
        table.setdefault(_shape_of_template(text), []).append((_Template.of(text), index))
    return table


def _shape_of_template(template: str) -> str:
    return _shape(template.replace("{}", "0"))
