"""Selects the layers that get an adapter. Pure: it maps paths and class names to paths, each with a reason.

A pattern has one of three meanings. The third applies only if neither of the others matches a layer:

    a run of dotted name parts    to_q   attn1.to_q   blocks.*.attn1.to_q   *img_mlp*   (a `*` stays within one part)
    a module class                Attention   FeedForward   WanTransformerBlock   Linear: every layer inside one
    a class by an older name      Attention, where the model only has WanAttention

The third exists because diffusers renames classes and presets keep the old names. `within` restricts the selection to
layers whose path contains one of the given runs of name parts, such as all layers of the blocks. `choose` serves both
models (`select`) and footprints (`adapters.trainable`), so that the plan counts the layers that are trained.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from gracetune.errors import ConfigError, Problem

Kind = Literal["linear", "conv", "norm", "parameter", "other"]
ADAPTABLE: tuple[Kind, ...] = ("linear", "conv")
"""The kinds that can carry an adapter. A full fine-tune also trains the others."""
_MOST_NEAR_MISSES, _SIMILARITY, _SHOWN = 3, 0.5, 3
_REGULAR_EXPRESSION = ("\\", ".*", "^", "$", "|", "(", "+")


@dataclass(frozen=True)
class ModuleInfo:
    class_name: str
    kind: Kind
    owners: tuple[str, ...] = ()
    """Classes of the modules around it, the innermost first."""
    spatial: bool = False
    """Whether it is a convolution whose kernel has more than one point."""

    @property
    def classes(self) -> tuple[str, ...]:
        return (self.class_name, *self.owners)


Modules = Mapping[str, ModuleInfo]
"""By path, in the model's order: every module without children, and every parameter of a module with children."""


@dataclass(frozen=True)
class LayerSelection:
    paths: tuple[str, ...]
    """In the model's own order."""
    why: Mapping[str, str]
    """The reason for every path, as a sentence."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Paths that a target matches but that are not selected, each with the reason."""


@dataclass(frozen=True)
class TargetChoice:
    """The choice that patterns make from a list of layers. A layer is given by its index in the list."""

    wanted: Mapping[int, str]
    """Every layer that a target matches, with the first such target."""
    left_out: Mapping[int, str]
    """The wanted layers that are not taken, each with the reason."""
    unmatched: tuple[str, ...]
    """Targets that match nothing."""
    unmatched_exclude: tuple[str, ...]
    unmatched_within: tuple[str, ...] = ()

    @property
    def taken(self) -> dict[int, str]:
        return {index: pattern for index, pattern in self.wanted.items() if index not in self.left_out}


def choose(
    layers: Sequence[tuple[str, ModuleInfo]],
    targets: Iterable[str],
    exclude: Iterable[str] = (),
    *,
    within: Collection[str] = (),
    include_spatial: bool = True,
    untrained: Iterable[str] = (),
    kinds: Collection[Kind] = ADAPTABLE,
) -> TargetChoice:
    """Apply all patterns to a list of layers.

    `exclude` may also match layers that cannot be adapted. `within` restricts the targets to layers with one of these
    runs of name parts in their path. `include_spatial` admits convolutions with kernels of more than one point.
    `untrained` are patterns of layers that get no gradient.
    """
    adaptable = [index for index, (_path, info) in enumerate(layers) if info.kind in kinds]
    inside = {part: {index for index in adaptable if matches_path(part, layers[index][0])} for part in within}
    candidates = [
        index for index in adaptable
        if (not within or any(index in some for some in inside.values()))
        and (include_spatial or not layers[index][1].spatial)
    ]  # fmt: skip
    wanted, unmatched = _first_matches(targets, layers, candidates)
    unwanted, unmatched_exclude = _first_matches(exclude, layers, range(len(layers)))
    without_gradient, _ = _first_matches(untrained, layers, candidates)
    left_out = {index: f"excluded by `{unwanted[index]}`" for index in wanted if index in unwanted}
    left_out |= {
        index: "no gradient ever reaches it" for index in wanted if index in without_gradient and index not in unwanted
    }
    return TargetChoice(
        wanted, left_out, unmatched, unmatched_exclude, tuple(part for part in within if not inside[part])
    )


def _first_matches(
    patterns: Iterable[str], layers: Sequence[tuple[str, ModuleInfo]], indices: Sequence[int]
) -> tuple[dict[int, str], tuple[str, ...]]:
    """The first pattern that matches each layer, and the patterns that match none."""
    found: dict[int, str] = {}
    unmatched = []
    for pattern in patterns:
        matched = [index for index in indices if _matches(pattern, *layers[index])]
        matched = matched or [
            index for index in indices if class_by_older_name(pattern, layers[index][1].classes) is not None
        ]
        if not matched:
            unmatched.append(pattern)
        for index in matched:
            found.setdefault(index, pattern)
    return found, tuple(unmatched)


def _matches(pattern: str, path: str, info: ModuleInfo) -> bool:
    return matches_path(pattern, path) or class_of(pattern, info.classes) is not None


def select(
    modules: Modules,
    targets: Iterable[str],
    exclude: Iterable[str] = (),
    *,
    within: Collection[str] = (),
    include_spatial: bool = True,
    untrained: Iterable[str] = (),
    kinds: Collection[Kind] = ADAPTABLE,
) -> LayerSelection:
    """Apply all patterns to a model. One `ConfigError` lists every pattern that matches nothing, with similar names.

    `untrained` are a family's patterns for layers that get no gradient. They override targets and may match nothing.
    """
    layers = list(modules.items())
    choice = choose(
        layers, targets, exclude, within=within, include_spatial=include_spatial, untrained=untrained, kinds=kinds
    )
    adaptable = {path: info for path, info in layers if info.kind in kinds}
    problems = [_unknown_within(part, adaptable) for part in choice.unmatched_within]
    if not problems:
        inside = {path: info for path, info in adaptable.items() if not within or _is_inside(within, path)}
        problems = [_unmatched("adapter.targets", pattern, inside, modules, within) for pattern in choice.unmatched]
    problems += [_unmatched("adapter.exclude", pattern, modules, modules) for pattern in choice.unmatched_exclude]
    if problems:
        raise ConfigError(problems)
    left_out = {layers[index][0]: reason for index, reason in choice.left_out.items()}
    taken = choice.taken
    why = {path: _reason(taken[index], path) for index, (path, _info) in enumerate(layers) if index in taken}
    if not why:
        raise ConfigError([_nothing_left(len(choice.wanted), left_out)])
    return LayerSelection(tuple(why), why, left_out)


def matching(pattern: str, modules: Modules) -> tuple[str, ...]:
    """Every path that one pattern matches."""
    layers = list(modules.items())
    found, _unmatched_patterns = _first_matches((pattern,), layers, range(len(layers)))
    return tuple(layers[index][0] for index in found)


def matches_path(pattern: str, path: str) -> bool:
    """Whether the pattern's parts occur in the path as a contiguous run."""
    wanted, parts = pattern.split("."), path.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatchcase, parts[start:], wanted)) for start in starts)


def class_of(pattern: str, classes: Iterable[str]) -> str | None:
    return next((name for name in classes if fnmatchcase(name, pattern)), None)


def class_by_older_name(pattern: str, classes: Iterable[str]) -> str | None:
    """The class that a pattern names by an older name: WanAttention for Attention. None if there is none."""
    if not pattern[:1].isupper() or not pattern.isalnum():
        return None
    return next((name for name in classes if name.endswith(pattern)), None)


def options_for(info: ModuleInfo, table: Collection[str], present: Collection[str]) -> str | None:
    """The entry of a table by module class (LyCORIS' `module_algo_map`) that applies to a layer: that of its innermost
    class.

    `present` are the classes of the model. An entry matches as an older name only if it is not one of them.
    """
    for name in info.classes:
        for entry in table:
            if entry == name or (entry not in present and class_by_older_name(entry, (name,)) is not None):
                return entry
    return None


def _is_inside(within: Collection[str], path: str) -> bool:
    return any(matches_path(part, path) for part in within)


def _reason(pattern: str, path: str) -> str:
    return (
        f"`{pattern}` is its name"
        if matches_path(pattern, path)
        else f"it is, or is inside, a module of class `{pattern}`"
    )


# -- messages ---------------------------------------------------------------------------------------------------------


def _unmatched(key: str, pattern: str, candidates: Modules, modules: Modules, within: Collection[str] = ()) -> Problem:
    expected = "a pattern that some layer's path or class matches"
    others = matching(pattern, modules)
    if within and others and not any(_is_inside(within, path) for path in others):
        shown = ", ".join(others[:_SHOWN])
        found = f"{pattern}: only matches layers outside adapter.within ({', '.join(within)}): {shown}"
        return Problem(key, found, expected, f"remove `{pattern}`, or --set 'adapter.within=[]'")
    if within and others and all(modules[path].spatial for path in others if _is_inside(within, path)):
        found = f"{pattern}: only matches convolutions, such as {others[0]}"
        return Problem(key, found, expected, f"remove `{pattern}`, or --set adapter.conv_rank=16: with "
                       "adapter.within, convolutions larger than 1 x 1 are adapted only if it is set")  # fmt: skip
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


def _unknown_within(part: str, adaptable: Modules) -> Problem:
    similar = [name for name in near_misses(part, adaptable) if name not in class_names(adaptable)]
    hint = f"near misses: {', '.join(similar)}" if similar else "--set 'adapter.within=[]' for the family's own choice"
    return Problem("adapter.within", f"{part}: in no layer's path", "names of modules, as in their paths", hint)


def near_misses(pattern: str, modules: Modules) -> list[str]:
    """Names similar to the pattern: class names, and runs of as many path parts as the pattern has, with `*` for
    numbers."""
    length = pattern.count(".") + 1
    runs: dict[str, None] = {}
    for path in modules:
        parts = ["*" if part.isdigit() else part for part in path.split(".")]
        for start in range(len(parts) - length + 1):
            runs[".".join(parts[start : start + length])] = None
    known = {name.lower(): name for name in (*class_names(modules), *runs) if name.strip("*.")}
    near = difflib.get_close_matches(pattern.lower(), known, n=_MOST_NEAR_MISSES, cutoff=_SIMILARITY)
    return [known[name] for name in near]


def class_names(modules: Modules) -> list[str]:
    return list(dict.fromkeys(name for info in modules.values() for name in info.classes))


def _nothing_left(wanted: int, left_out: Mapping[str, str]) -> Problem:
    if not wanted:
        return Problem("adapter.targets", "no pattern", "layers to adapt", "name some, such as to_q")
    path, reason = next(iter(left_out.items()))
    found = f"{wanted} layers, all of them left out ({path}: {reason})"
    return Problem("adapter.targets", found, "at least one layer to train", "name more targets, or exclude less")
