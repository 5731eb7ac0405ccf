"""Checks that an adapter's state fits the attached layers, completely and before any value is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gracetune.adapters.algorithms.matrices import is_finite
from gracetune.adapters.algorithms.record import Algorithm
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.delta import BASE_MAGNITUDE
from gracetune.adapters.layer import AttachedLayer
from gracetune.adapters.state import AdapterState, ExpertStage, Layer
from gracetune.errors import ConfigError, Problem

_SHOWN = 8


def fit_to_layers(
    state: AdapterState, family: str, expert: ExpertStage, layers: Mapping[str, AttachedLayer]
) -> dict[str, dict[str, Tensor]]:
    """The state's tensors in the form of the attached layers, by path. A `ConfigError` lists all that does not fit.

    If a layer's alpha differs from the file's, the ratio of the scales is multiplied into a tensor, so that the effect
    stays that of the file.
    """
    problems = _wrong_model(state, family, expert)
    problems += _first_few([path for path in layers if path not in state.layers], _missing)
    problems += _first_few([path for path in state.layers if path not in layers], _unexpected)
    fitting: dict[str, dict[str, Tensor]] = {}
    wrong: list[Problem] = []
    for path, target in layers.items():
        if path in state.layers:
            layer = _renamed_for(state.layers[path], target.record)
            wrong += _mismatches(path, layer, target)
            fitting[path] = _rescaled(layer, target.scale)
    problems += wrong[:_SHOWN]
    if len(wrong) > _SHOWN:
        problems.append(_more(len(wrong) - _SHOWN, wrong[_SHOWN]))
    if problems:
        raise ConfigError(problems)
    return fitting


def _wrong_model(state: AdapterState, family: str, expert: ExpertStage) -> list[Problem]:
    problems = []
    if state.family != family:
        problems.append(Problem("adapter", f"made for {state.family}", f"one for {family}", "give another file"))
    if state.expert and expert and state.expert != expert:
        hint = f"give the file of the {expert} expert"
        problems.append(Problem("adapter", f"of the {state.expert} expert", f"one of the {expert} expert", hint))
    return problems


def _renamed_for(layer: Layer, record: Algorithm) -> Layer:
    tensors = record.renamed(layer.algorithm, layer.tensors)
    return layer if tensors is None else Layer(record.name, tensors, layer.alpha, layer.rank)


def _mismatches(path: str, layer: Layer, target: AttachedLayer) -> list[Problem]:
    if BASE_MAGNITUDE in layer.tensors:
        hint = "give the file it was converted from"
        return [Problem(path, "a DoRA converted for ComfyUI", "one as it was trained", hint)]
    if layer.algorithm != target.algorithm:
        hint = f"--set adapter.kind={layer.algorithm}, or give another file"
        return [Problem(path, layer.algorithm, target.algorithm, hint)]
    shapes = {**target.shapes(), **{name: tensor.shape for name, tensor in target.constants.items()}}
    hint = "train with the rank, factor and targets the file was made with, or give another file"
    problems = []
    for name in [*shapes, *(name for name in layer.tensors if name not in shapes)]:
        tensor, shape = layer.tensors.get(name), shapes.get(name)
        if tensor is None:
            problems.append(Problem(f"{path}.{name}", "missing", f"a tensor {list(shape or ())}", hint))
        elif shape is None:
            problems.append(Problem(f"{path}.{name}", f"a tensor {list(tensor.shape)}", "no such tensor", hint))
        elif name in target.constants and not torch.equal(tensor.float(), target.constants[name].float()):
            problems.append(Problem(f"{path}.{name}", str(tensor.tolist()), str(target.constants[name].tolist()), hint))
        elif tensor.shape != shape:
            problems.append(Problem(f"{path}.{name}", f"shape {list(tensor.shape)}", f"shape {list(shape)}", hint))
        elif not is_finite(tensor):
            hint_finite = "take an earlier checkpoint: this one was saved after training had diverged"
            problems.append(Problem(f"{path}.{name}", "NaN or infinite values", "finite numbers", hint_finite))
    return problems


def _rescaled(layer: Layer, scale: float) -> dict[str, Tensor]:
    """The tensors that have the same effect at this scale as the layer's own at its scale."""
    tensors = dict(layer.tensors)
    if layer.scale != scale:
        name = next((name for name in algorithm(layer.algorithm).proportional_to if name in tensors), None)
        if name is not None:
            tensors[name] = tensors[name].float() * (layer.scale / scale)
    return tensors


def _missing(paths: str) -> Problem:
    return Problem(paths, "missing: the adapter has nothing for it", "every layer this run trains",
                   "name in adapter.targets what the file was trained on")  # fmt: skip


def _unexpected(paths: str) -> Problem:
    return Problem(paths, "unexpected: this run does not train it", "only layers this run trains",
                   "name in adapter.targets what the file was trained on")  # fmt: skip


def _first_few(paths: list[str], problem: Callable[[str], Problem]) -> list[Problem]:
    problems = [problem(path) for path in paths[:_SHOWN]]
    if len(paths) > _SHOWN:
        problems.append(_more(len(paths) - _SHOWN, problems[-1]))
    return problems


def _more(count: int, last: Problem) -> Problem:
    return Problem("...", f"{count:,} more of this kind", last.expected, last.hint)
