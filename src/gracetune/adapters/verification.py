"""Checks that an adapter fits a model: every layer exists and has the right size, no key is left over, no value is NaN.

An adapter does not have to cover every layer. A layer without an adapter is reported only if the same layer of other
blocks has one, and this does not count as a mismatch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from gracetune.adapters.formats.reading import AdapterContents
from gracetune.adapters.shapes import misfit
from gracetune.adapters.state import ExpertStage

Shapes = Mapping[str, Sequence[int]]
"""Weight shapes of a model's layers, by path."""


@dataclass(frozen=True)
class Verified:
    expert: ExpertStage
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    """Layers with missing or inconsistent tensors, each with the reason."""
    unexpected: tuple[str, ...]
    """Layers the model does not have, and keys that name no layer."""
    mismatched: tuple[str, ...]
    """Layers of another size, with both sizes, and contradictory statements about the expert."""
    not_finite: tuple[str, ...]
    left_out: tuple[str, ...]
    """Layers without an adapter although the same layer of another block has one."""

    @property
    def ok(self) -> bool:
        return bool(self.matched) and not (self.missing or self.unexpected or self.mismatched or self.not_finite)


def verify(reading: AdapterContents, models: Mapping[ExpertStage, Shapes]) -> list[Verified]:
    """One report for each expert in the file. `models` has the shapes by expert; `""` applies to any other expert."""
    broken = tuple(f"{layer}: {why}" for layer, why in reading.broken.items())
    reports = []
    for expert, state in sorted(reading.states.items()):
        shapes = models.get(expert) or models.get("") or next(iter(models.values()))
        misfits = {path: misfit(layer, shapes[path]) for path, layer in state.layers.items() if path in shapes}
        matched = tuple(path for path, why in misfits.items() if why is None)
        reports.append(
            Verified(
                expert=expert,
                matched=matched,
                missing=broken,
                unexpected=(*(path for path in state.layers if path not in shapes), *reading.unknown),
                mismatched=(
                    *reading.contradictions,
                    *(f"{path}: {why}" for path, why in misfits.items() if why is not None),
                ),
                not_finite=reading.not_finite,
                left_out=_left_out(state.layers, shapes),
            )
        )
    if not reports:
        reports.append(Verified("", (), broken, reading.unknown, (), reading.not_finite, ()))
    return reports


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The weight shapes of every layer that can have an adapter. The model may be on the meta device."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return {path: tuple(layer.weight.shape) for path, layer in model.named_modules() if isinstance(layer, kinds)}


def _left_out(adapted: Iterable[str], shapes: Shapes) -> tuple[str, ...]:
    have = set(adapted)
    roles = {_role(path) for path in have if re.search(r"\.[0-9]+\.", path)}
    return tuple(path for path in shapes if path not in have and _role(path) in roles)


def _role(path: str) -> str:
    """The path without block numbers: the same layer of different blocks has the same role."""
    return re.sub(r"(?<=\.)[0-9]+(?=\.)", "#", path)
