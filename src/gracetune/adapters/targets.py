"""Which layers an adapter sits on. Pure: paths and class names in, paths and the reason for each out.

A pattern is one of three things, and a config does not say which:

    a run of dotted name parts    to_q   attn1.to_q   blocks.*.attn1.to_q   *img_mlp*   (a `*` stays within one part)
    a module class                Attention   FeedForward   WanTransformerBlock   Linear: every layer inside one
    a class by an older name      Attention, where the model only has WanAttention

The first two are what `adapters.trainable` counts with; the third because presets outlive class names.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from gracetune.errors import ConfigError, Problem

Kind = Literal["linear", "conv", "norm", "parameter", "other"]
ADAPTABLE: tuple[Kind, ...] = ("linear", "conv")
"""What carries an adapter; a full fine-tune trains the others too."""
_NEAR, _CUTOFF, _SHOWN = 3, 0.5, 3
_REGULAR_EXPRESSION = ("\\", ".*", "^", "$", "|", "(", "+")


@dataclass(frozen=True)
class ModuleInfo:
    class_name: str
    kind: Kind
    owners: tuple[str, ...] = ()
    """Classes of the modules around it, the nearest first."""

    @property
    def classes(self) -> tuple[str, ...]:
        return (self.class_name, *self.owners)


Modules = Mapping[str, ModuleInfo]
"""By path, in the model's own order: every module without children, and parameters that stand alone."""


@dataclass(frozen=True)
class Selection:
    paths: tuple[str, ...]
    """In the model's own order."""
    why: Mapping[str, str]
    """A sentence for every path."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Paths a target asked for that are not taken, and the sentence that says why."""


def select(
    modules: Modules,
    targets: Iterable[str],
    exclude: Iterable[str] = (),
    *,
    untrained: Iterable[str] = (),
    kinds: Collection[Kind] = ADAPTABLE,
) -> Selection:
    """Apply all patterns. One that matches nothing is an error that names what comes near it; all come together.

    `untrained` are a family's own patterns of layers no gradient reaches: they may match nothing, and win over targets.
    """
    candidates = {path: info for path, info in modules.items() if info.kind in kinds}
    problems: list[Problem] = []
    wanted = _explained("adapter.targets", targets, candidates, modules, problems)
    unwanted = _explained("adapter.exclude", exclude, modules, modules, problems)
    if problems:
        raise ConfigError(problems)
    idle = {path for pattern in untrained for path in matching(pattern, candidates)}
    left_out = {path: f"excluded by `{unwanted[path]}`" for path in wanted if path in unwanted}
    left_out |= {path: "no gradient ever reaches it" for path in wanted if path in idle and path not in unwanted}
    why = {path: _reason(wanted[path], path) for path in candidates if path in wanted and path not in left_out}
    if not why:
        raise ConfigError([_nothing_left(wanted, left_out)])
    return Selection(tuple(why), why, left_out)


def _explained(
    key: str, patterns: Iterable[str], candidates: Modules, modules: Modules, problems: list[Problem]
) -> dict[str, str]:
    """Path -> the first pattern that matches it."""
    found: dict[str, str] = {}
    for pattern in patterns:
        paths = matching(pattern, candidates)
        if not paths:
            problems.append(_unmatched(key, pattern, candidates, modules))
        for path in paths:
            found.setdefault(path, pattern)
    return found


def matching(pattern: str, modules: Modules) -> tuple[str, ...]:
    """Every path one pattern stands for."""
    found = tuple(
        path for path, info in modules.items() if names(pattern, path) or class_of(pattern, info.classes) is not None
    )
    return found or tuple(path for path, info in modules.items() if renamed(pattern, info.classes) is not None)


def names(pattern: str, path: str) -> bool:
    """Whether the pattern's parts stand next to each other in the path."""
    wanted, parts = pattern.split("."), path.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatchcase, parts[start:], wanted)) for start in starts)


def class_of(pattern: str, classes: Iterable[str]) -> str | None:
    return next((name for name in classes if fnmatchcase(name, pattern)), None)


def renamed(pattern: str, classes: Iterable[str]) -> str | None:
    """The class that has a model's name in front of the one asked for: WanAttention for Attention."""
    if not pattern[:1].isupper() or not pattern.isalnum():
        return None
    return next((name for name in classes if name.endswith(pattern)), None)


def options_for(info: ModuleInfo, table: Collection[str], present: Collection[str]) -> str | None:
    """The entry of a table by module class (LyCORIS `module_algo_map`) that holds for a layer: its innermost class's.

    `present` are the classes the model has: an older name counts only where it is none of them.
    """
    for name in info.classes:
        for entry in table:
            if entry == name or (entry not in present and renamed(entry, (name,)) is not None):
                return entry
    return None


def _reason(pattern: str, path: str) -> str:
    return f"`{pattern}` is its name" if names(pattern, path) else f"inside a module of class `{pattern}`"


# -- messages ---------------------------------------------------------------------------------------------------------


def _unmatched(key: str, pattern: str, candidates: Modules, modules: Modules) -> Problem:
    expected = "a pattern that some layer's path or class matches"
    others = matching(pattern, modules)
    if others:
        shown = ", ".join(f"{path} ({modules[path].class_name})" for path in others[:_SHOWN])
        found = f"{pattern}: only matches what cannot be adapted: {shown}"
        return Problem(key, found, "linear or convolution layers", f"remove `{pattern}`, or name a layer inside it")
    near = near_misses(pattern, candidates)
    hint = (
        f"near misses: {', '.join(near)}" if near else f"one of the classes: {', '.join(class_names(candidates)[:12])}"
    )
    if any(sign in pattern for sign in _REGULAR_EXPRESSION):
        hint += "; patterns are no regular expressions: write `*` for any text within one part of a path"
    return Problem(key, f"{pattern}: matches nothing in this model", expected, hint)


def near_misses(pattern: str, modules: Modules) -> list[str]:
    """Names like the pattern: runs of as many parts, numbers written `*`, and classes."""
    length = pattern.count(".") + 1
    runs: dict[str, None] = {}
    for path in modules:
        parts = ["*" if part.isdigit() else part for part in path.split(".")]
        for start in range(len(parts) - length + 1):
            runs[".".join(parts[start : start + length])] = None
    known = {name.lower(): name for name in (*class_names(modules), *runs) if name.strip("*.")}
    near = difflib.get_close_matches(pattern.lower(), known, n=_NEAR, cutoff=_CUTOFF)
    return [known[name] for name in near]


def class_names(modules: Modules) -> list[str]:
    return list(dict.fromkeys(name for info in modules.values() for name in info.classes))


def _nothing_left(wanted: Mapping[str, str], left_out: Mapping[str, str]) -> Problem:
    if not wanted:
        return Problem("adapter.targets", "no pattern at all", "layers to adapt", "name some, such as to_q")
    path, reason = next(iter(left_out.items()))
    found = f"{len(wanted)} layers, all of them left out ({path}: {reason})"
    return Problem("adapter.targets", found, "at least one layer to train", "name more targets, or exclude less")
